"""The backends: which function computes which operator, in PyTorch, in C++ and in Triton."""
