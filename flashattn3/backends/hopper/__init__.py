"""The Hopper kernels: what they take, their launches, the compiled library."""
