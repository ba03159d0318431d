"""Products on an NVIDIA GPU: kernels, plans, and libraries that return the same bytes."""
