"""What the frozen base of an adapter takes, by preset, and how long its products take where codes
share a byte.

    python -m benchmarks frozen_base

Bytes are counted in the storages of an open model: its linear layers, and what the backend packed
of them besides. Times are of the native backend alone, of one matrix of 3,072 by 1,024: beside
activations in BF16 over the same matrix in FP8, beside those in NVFP4 over the same weight with a
code to a byte.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from isobit import Model
from isobit.kernels import Packed, get_ops, tensors_of
from isobit.model.adapters.targets import NewAdapter
from isobit.precision import E2M1, E4M3, QuantSpec, quantize
from isobit.precision.packed_fp4 import NVFP4, packed

PRESETS = ("bf16", "fp8", "mxfp8", "nvfp4")
_ROWS = {1: 4.0, 8: 2.0, 256: 1.1}
"""And how many times the seconds of FP8 are allowed."""


def run(rounds: int) -> Result:
    result = Result("frozen_base")
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder) / "model", 1024, 8, 4096)
        for preset in PRESETS:
            result.parts[preset] = _bits(Model.load(path, preset, adapter=NewAdapter(8, 16)))
    stored = {preset: parts["codes and scales"] for preset, parts in result.parts.items()}
    result.claims.append(
        Claim("nvfp4: bits a weight, scales included", stored["nvfp4"], "<=", 4.51)
    )
    for other, limit in (("fp8", 0.57), ("bf16", 0.29)):
        ratio = stored["nvfp4"] / stored[other]
        result.claims.append(Claim(f"nvfp4: bytes of the base over {other}'s", ratio, "<=", limit))
    _time(result, rounds)
    return result


def _bits(model: Model) -> dict[str, float]:
    """Of a weight of the linear layers."""
    linear = [weight for weight in model.transformer.rollout_weights() if "lora" not in weight.name]
    count = sum(weight.working.shape[0] * weight.working.shape[1] for weight in linear)
    stored = sum(
        t.numel() * t.element_size() for weight in linear for t in tensors_of(weight.working)
    )
    packs = sum(weight.prepared.nbytes for weight in linear if isinstance(weight.prepared, Packed))
    return {
        "codes and scales": 8 * stored / count,
        "packs of the native backend": 8 * packs / count,
    }


def _time(result: Result, rounds: int) -> None:
    ops, random = get_ops("native"), torch.Generator().manual_seed(0)
    x = torch.randn(3072, 1024, generator=random)
    wide = quantize(x, NVFP4)
    low, fp8 = packed(wide, x), ops.prepare(quantize(x, QuantSpec(E4M3, "128x128", "ue8m0")))
    for rows, most in _ROWS.items():
        plain = torch.randn(rows, 1024, generator=random).bfloat16()
        codes = quantize(plain, QuantSpec(E4M3, "1x128", "ue8m0"))
        nibbles = quantize(plain, QuantSpec(E2M1, "1x16", "nvfp4-row"))
        for name, a, other, b, c, limit in (
            ("BF16", plain, "FP8", codes, fp8, most),
            ("NVFP4", nibbles, "a code to a byte", nibbles, wide, 1.0),
        ):
            found = race(
                f"{rows} rows in {name}",
                {
                    other: lambda b=b, c=c: ops.product(b, c),
                    "two codes to a byte": lambda a=a: ops.product(a, low),
                },
                rounds,
            )
            result.rows += found
            what = f"{rows} rows in {name}: seconds of two codes to a byte over those of {other}"
            result.claims.append(Claim(what, found[1].median_s / found[0].median_s, "<=", limit))
