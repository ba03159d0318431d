"""The sigmoid of gradients: where it stands, what its bound is made of, and that the script's case
sees what is beyond it."""

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import approximate
from benchmarks.gpu.approximate import APPROXIMATE, LEAST, bound, grid
from benchmarks.gpu.common import Bench, Case
from benchmarks.gpu.results import Results
from isobit.kernels.triton.launch import record_launches
from isobit.kernels.triton.numbers import SIGMOID
from tests.kernels.compiler import python


def _on_a_card(x: Tensor, exponential: float, reciprocal: float) -> Tensor:
    """The kernel's four instructions, of which the approximate ones are off by these parts of their
    results, their rounding among it; a number below 2^-126 is zero."""
    (factor,) = struct.unpack(">f", struct.pack(">f", -math.log2(math.e)))
    exponent = (x * torch.tensor(factor)).double()
    e = torch.exp2(exponent) * (1 + exponential)
    found = (1 + e).float().double().reciprocal() * (1 + reciprocal)
    return torch.where(found < LEAST, 0.0, found)


def _beyond(found: Tensor) -> int:
    sigma, limit = bound(grid(64))
    return int(((found.double() - sigma).abs() > limit).sum())


def test_instructions_as_the_manual_has_them_keep_the_bound() -> None:
    """Off by the most that they may be, to either side. The controls: either of them by twice as
    much, and an exponent as far off as BF16's."""
    x = grid(64)
    for exponential in (-APPROXIMATE, 0.0, APPROXIMATE):
        for reciprocal in (-APPROXIMATE, 0.0, APPROXIMATE):
            assert _beyond(_on_a_card(x, exponential, reciprocal)) == 0
    assert _beyond(_on_a_card(x, 0.0, 2 * APPROXIMATE)) > 100
    assert _beyond(_on_a_card(x, 2 * APPROXIMATE, -APPROXIMATE)) > 100
    assert _beyond(_on_a_card(x * (1 + 2.0**-9), 0.0, 0.0)) > 1000


def test_the_instructions_are_those_that_the_bound_counts() -> None:
    """One product by log2(e), one sum and two approximations; each written number is its float32."""
    text = SIGMOID.value
    lines = [line.split()[0] for line in text.splitlines()[2:-1]]
    assert lines == ["mul.rn.f32", "ex2.approx.ftz.f32", "add.rn.f32", "rcp.approx.ftz.f32"]
    numbers = [
        struct.unpack(">f", bytes.fromhex(word[2:]))[0] for word in ("0fBFB8AA3B", "0f3F800000")
    ]
    assert all(word in text for word in ("0fBFB8AA3B", "0f3F800000"))
    assert numbers == [float(torch.tensor(-math.log2(math.e))), 1.0]


def _case(tmp_path: Path) -> Case:
    case = Case("sigmoid", True)
    approximate.check(case, Bench("bits", Results(tmp_path, "one", True)))
    return case


def test_the_interpreter_keeps_the_bound(tmp_path: Path) -> None:
    case = _case(tmp_path)
    assert [row["holds"] for row in case.rows] == [True, True]
    assert 0.0 < float(str(case.rows[0]["largest"])) <= 1.0 < float(str(case.rows[1]["largest"]))


def test_a_kernel_that_does_nothing_and_one_that_is_off_do_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty_like
    with monkeypatch.context() as patch, record_launches():
        patch.setattr(torch, "empty_like", lambda x: empty(x).zero_())
        assert not _case(tmp_path).rows[0]["holds"]
    own = approximate.bound
    monkeypatch.setattr(approximate, "bound", lambda x: (own(x)[0] * (1 + 2.0**-20), own(x)[1]))
    assert not _case(tmp_path).rows[0]["holds"]


_PROGRAM = """
import json, torch
from benchmarks.cross_compile import kernel_name, triton_compile
from isobit.kernels.norms.triton import gate
from isobit.kernels.triton.launch import record_launches
from isobit.precision import E4M3, QuantSpec
from triton.backends.compiler import GPUTarget

meta, spec = torch.device("meta"), QuantSpec(E4M3, "1x128")
x, h = (torch.empty(300, n, dtype=torch.bfloat16, device=meta) for n in (512, 256))
flag = torch.empty(1, dtype=torch.int32, device=meta)
with record_launches() as found:
    gate.gate_mul("silu", x)
    gate.gate_mul_quantized("silu", x, spec, flag)
    gate.gate_mul_backward("silu", h, x)
    gate.gate_mul_backward_quantized("silu", h, x, spec, flag)
for launch in found:
    ptx = triton_compile(launch, GPUTarget("cuda", 90, 32)).asm["ptx"]
    print(json.dumps([kernel_name(launch), "rcp.approx.ftz.f32" in ptx, "div.rn.f32" in ptx]))
"""


@pytest.mark.slow
def test_it_is_the_gradients_alone(tmp_path: Path) -> None:
    """A forward, a rollout's and a learner's alike, divides exactly; both backwards do not."""
    found = [json.loads(line) for line in python(_PROGRAM, tmp_path).splitlines()]
    approximate = {name: by for name, by, _ in found}
    assert approximate == {
        "norms.gate.gate_mul": False,
        "norms.gate.backward": True,
        "norms.gate.backward_quantized": True,
    }
    assert all(exact for name, _, exact in found if name == "norms.gate.gate_mul")
