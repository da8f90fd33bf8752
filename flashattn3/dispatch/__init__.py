"""From a problem and a device to a backend and its kernel config."""
