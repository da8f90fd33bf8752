"""Attention in torch operations, for every device and floating type."""
