"""The Triton kernels: what they take, their tiles, their launches."""
