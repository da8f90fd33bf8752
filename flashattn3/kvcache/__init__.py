"""Attention to cached keys and values: contract, checks, operators and public functions."""
