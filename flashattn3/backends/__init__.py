"""The backends: one folder each, their interface, and what they share."""
