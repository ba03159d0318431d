"""The names of the precision flows (`isobit.precision.PRESETS`), without torch, which these would need."""

PRECISIONS = (
    "float32", "bf16", "fp8-rollout", "fp8-rollout-kv", "fp8-e2e", "fp8-unified", "fp8", "mxfp8-rollout",
    "nvfp4-rollout", "mxfp8", "nvfp4",
)  # fmt: skip
"""In the order of `PRESETS` (tests/test_completion.py)."""
