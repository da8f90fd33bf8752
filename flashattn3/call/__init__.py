"""One call: its arguments, checked and normalised to a ``Problem``."""
