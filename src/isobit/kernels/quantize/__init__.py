"""Quantization; `isobit.precision.quantize` defines it."""
