"""Which number formats the kernels for a GPU compute, and on which cards: asked before a run, and by
a plan, without a GPU and without Triton.

Left out: whether a kernel fits a card's shared memory, which is known once it is compiled
(`kernels/triton/launch.py`).
"""

from isobit.precision import E4M3, INT8, Precision, QuantSpec
from isobit.precision.packed_fp4 import NVFP4

_CACHED = (E4M3, INT8)
"""Formats of keys and values; of all else E4M3 alone."""
_ALLOWED = {
    "weights": ("128x128",),
    "activations": ("1x128",),
    "output gradients": ("1x128",),
    "keys and values": ("row", "tensor"),
    "queries": ("row",),
}
_BESIDES = {"weights": ", and those of precision: nvfp4[activation=bf16]"}


def refused(precision: Precision, fp8: bool) -> str | None:
    """Why kernels do not compute this precision on a card that multiplies FP8 or does not, as one
    line; None if they do."""
    specs: list[tuple[str, QuantSpec | None]] = []
    for flow in (precision.rollout, precision.learner):
        if flow.probabilities is not None:
            return (
                f"backend: triton has no kernel for probabilities in {flow.probabilities} "
                f"(preset {precision.name}); use backend: native, or leave "
                "precision.probabilities out"
            )
        decoded = flow.weight == NVFP4 and flow.activation is None and fp8
        specs += [
            ("weights", None if decoded else flow.weight),
            ("activations", flow.activation),
        ]
        specs += [("keys and values", flow.kv), ("queries", flow.query)]
    specs.append(("output gradients", precision.gradient))
    for role, spec in specs:
        if spec is None:
            continue
        forms = _CACHED if role == "keys and values" else (E4M3,)
        if not fp8 and spec.format is not INT8:
            return (
                f"backend: triton has {role} in FP8 (preset {precision.name}) from sm_89 on, "
                "and this GPU is older; use precision: bf16, or backend: native"
            )
        computed = (
            spec.format in forms
            and spec.granularity in _ALLOWED[role]
            and spec.scale in ("fp32", "ue8m0")
        )
        if not computed:
            names = " or ".join(form.name for form in forms)
            allowed = " or ".join(_ALLOWED[role])
            return (
                f"backend: triton has no kernel for {role} in {spec} (preset {precision.name}): it "
                f"takes {names}, {allowed}, with fp32 or ue8m0 scales{_BESIDES.get(role, '')}; use "
                "backend: native"
            )
    return None
