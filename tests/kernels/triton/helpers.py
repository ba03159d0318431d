"""Where Triton kernels are tested: on the GPU where there is one, else in Triton's interpreter."""

import os

import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

assert HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1", "tests/conftest.py sets it before Triton is imported"
