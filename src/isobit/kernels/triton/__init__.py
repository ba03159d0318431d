"""The Triton backend: kernels for NVIDIA GPUs behind the operators' table."""
