"""The matrices that Muon takes one by one: those of a model's arithmetic, also where a checkpoint has
several in one tensor."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.distributed import ALONE, Ranks
from isobit.model import Model
from isobit.model.hub.names import matrices, parts
from isobit.rl import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from tests.distributed.threads import run
from tests.models import tiny_model

from .test_muon import jordan

SETTINGS = OptimizerSettings(learning_rate=0.02, weight_decay=0.0, max_grad_norm=1e9, name="muon")
_QKV, _GATE_UP = (32, 16, 16), (48, 48)
FUSED: dict[str, dict[str, tuple[int, ...]]] = {
    "phi3": {"layers.0.qkv": _QKV, "layers.0.gate_up": _GATE_UP},
    "glm4": {"layers.0.gate_up": _GATE_UP},
    "qwen3_5_text": {"layers.0.qkv": (16, 16, 48, 48)},
    "qwen3_5_moe_text": {"layers.0.qkv": (16, 16, 48, 48)},
    "nemotron_h": {"layers.1.qkv": (48, 48, 16, 16, 4)},
}
"""By family, masters whose matrices are not tensors of the checkpoint, and their rows: of linear
attention queries, keys, values and gates; of Mamba-2 gates, values, C and B, and steps."""
APART: dict[str, dict[str, tuple[int, ...]]] = {
    "qwen3": {"layers.0.qkv": _QKV, "layers.0.gate_up": _GATE_UP, "layers.0.o": (32,)},
    "qwen3_5_text": {"layers.1.qkv": (64, 16, 16), "layers.0.gate_up": _GATE_UP},
    "gemma4_text": {"layers.0.qkv": _QKV, "layers.1.qkv": (64, 16)},
    "gemma4_text-small": {"layers.3.qkv": (64,)},
    "qwen3_next": {"layers.0.qkv": (128,), "layers.0.gates": (8,)},
    "deepseek_v3": {"layers.0.qkv_a": (20, 20), "layers.0.kv_b": (56,)},
    "nemotron_h": {"layers.0.shared.gate_up": (40,), "layers.0.experts.0.gate_up": (24,)},
}
"""Masters whose matrices are tensors of the checkpoint."""


@pytest.mark.parametrize("family", {**FUSED, **APART})
def test_the_rows_of_each_matrix(family: str) -> None:
    """Those of tensors are sums of them. The control: where several are in one tensor, they are
    more than the tensors."""
    config = tiny_model("fp8", family).config
    found = matrices(config)
    tensors = {name: [shape[0] for _, shape in each] for name, each in parts(config)}
    for name, heights in found.items():
        if name.endswith("_bias"):  # AdamW's
            continue
        ends = [sum(heights[: n + 1]) for n in range(len(heights))]
        assert {sum(tensors[name][: n + 1]) for n in range(len(tensors[name]))} <= {*ends}, name
    for name, heights in FUSED.get(family, {}).items():
        assert found[name] == heights
        assert len(tensors[name]) < len(heights)
    for name, heights in APART.get(family, {}).items():
        assert found[name] == heights == tuple(tensors[name])


def _stepped(model: Model, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a step takes from the rows of the masters that a rank keeps."""
    chosen = ShardedOptimizer.of(model, SETTINGS)
    before = {name: p.detach().clone() for name, p in chosen.parameters.items()}
    shards = model.transformer.masters.shards
    for name, holder in chosen.holders.items():
        holder.grad = gradients[name][slice(*shards.own(name))].clone()
    chosen.step(SETTINGS.learning_rate, 0.0)
    return {name: before[name] - p.detach() for name, p in chosen.parameters.items()}


def _gradients(model: Model) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = model.transformer.masters.shards.shapes
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _exact(gradient: Tensor, heights: Sequence[int]) -> Tensor:
    """The step of a first gradient, in float64, of each matrix by itself."""
    steps = []
    for matrix in gradient.double().split(list(heights)):
        nesterov = 0.05 * matrix * 0.95 + 0.05 * matrix
        scale = SETTINGS.learning_rate * 0.2 * math.sqrt(max(matrix.shape))
        steps.append(jordan(nesterov, SETTINGS.ns_steps, torch.float64) * scale)
    return torch.cat(steps)


@pytest.mark.parametrize("family", FUSED)
def test_fused_matrices_are_orthogonalized_one_by_one(family: str) -> None:
    """Within BF16's noise of the iteration in float64; as one matrix it is far from that, which is
    the control."""
    model = tiny_model("fp8", family)
    gradients = _gradients(model)
    moved = _stepped(model, gradients)
    for name, heights in FUSED[family].items():
        wanted, whole = _exact(gradients[name], heights), _exact(gradients[name], [sum(heights)])
        assert float((moved[name] - wanted).norm() / wanted.norm()) < 0.02, name
        assert float((whole - wanted).norm() / wanted.norm()) > 0.1, name


@pytest.mark.parametrize("family", ["phi3", "nemotron_h"])
def test_two_ranks_have_the_bits_of_one(family: str) -> None:
    """Which each keep some rows of a fused master, not whole matrices. The control is another
    gradient."""

    def on(ranks: Ranks, sign: float = 1.0) -> dict[str, Tensor]:
        model = tiny_model("fp8", family, ranks=ranks)
        shards = model.transformer.masters.shards
        moved = _stepped(model, {n: sign * g for n, g in _gradients(model).items()})
        rows = ranks.all_gather_tensors(moved)
        ordered = {
            name: sorted(
                (r for r in range(ranks.size) if name in rows[r]),
                key=lambda rank: shards.rows[name][rank],
            )
            for name in shards.shapes
        }
        return {name: torch.cat([rows[r][name] for r in each]) for name, each in ordered.items()}

    alone, other = on(ALONE), on(ALONE, -1.0)
    for found in run(2, on):
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], alone[name]) for name in alone)
    assert not all(torch.equal(other[name], alone[name]) for name in FUSED[family])


def test_another_rule_scales_each_matrix_by_its_own_sides() -> None:
    """`adjust_lr: original`: of a matrix with more rows than columns, which the fused one is and its
    parts are not."""
    model = tiny_model("fp8", "phi3")
    chosen = ShardedOptimizer.of(model, replace(SETTINGS, adjust_lr="original"))
    gradient = _gradients(model)["layers.0.qkv"]
    before = chosen.parameters["layers.0.qkv"].detach().clone()
    chosen.holders["layers.0.qkv"].grad = gradient.clone()
    chosen.step(SETTINGS.learning_rate, 0.0)
    moved = before - chosen.parameters["layers.0.qkv"].detach()
    wanted = torch.cat([jordan(m.double(), 5, torch.float64) for m in gradient.split(list(_QKV))])
    apart = (moved / SETTINGS.learning_rate - wanted).norm() / wanted.norm()
    assert float(apart) < 0.02
    assert math.sqrt(sum(_QKV) / 32) > 1.4
