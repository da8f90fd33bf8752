"""The Triton backend: supported problems, tile configs, launches, kernels."""
