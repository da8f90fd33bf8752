"""Triton FlashAttention-2: the GPU work on every chip that has no kernels of its own here."""
