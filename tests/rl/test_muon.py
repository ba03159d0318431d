"""Muon against the published implementations, and its promise: the same bits on any number of ranks
and threads."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from isobit.config import load_config
from isobit.distributed import ALONE, Ranks, Shards
from isobit.distributed.shards import ownership
from isobit.errors import Corruption, IsobitError
from isobit.kernels import get_ops
from isobit.model.weights.masters import Masters, own_rows
from isobit.rl import OptimizerSettings
from isobit.rl.optim import muon
from isobit.rl.optim.muon import COEFFICIENTS, Muon, adjustment, orthogonalized
from isobit.rl.optim.sharded import ShardedOptimizer, bytes_of_state, optimizer_type
from isobit.training.train import resume, train
from tests.distributed.threads import run
from tests.models import tiny_model
from tests.runs import fingerprint, write_config

SETTINGS = OptimizerSettings(learning_rate=0.02, weight_decay=0.1, max_grad_norm=1e9, name="muon")
SHAPES = {
    "embed": (300, 48),
    "layers.0.input_norm": (48,),
    "layers.0.qkv": (512, 160),
    "layers.0.o": (160, 256),
    "layers.0.experts.0.down": (160, 33),
    "layers.0.experts.1.down": (160, 33),
}
MATRICES = {"layers.0.qkv": (256, 128, 128)}


def drawn(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def optimizer(
    settings: OptimizerSettings = SETTINGS,
    values: Mapping[str, Tensor] | None = None,
    ranks: Ranks = ALONE,
    matrices: Mapping[str, Sequence[int]] = MATRICES,
) -> ShardedOptimizer:
    given = drawn(0) if values is None else values
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    dtype = torch.bfloat16 if settings.masters == "bf16" else torch.float32
    kept = {name: rows.clone() for name, rows in own_rows(given, ranks).items()}
    masters = Masters(kept, shapes, torch.device("cpu"), ranks, dtype)
    shards = Shards.of(shapes, ranks)
    return ShardedOptimizer(
        masters.parameters, settings, shards, get_ops("native"), masters.holders, matrices
    )


def descend(chosen: ShardedOptimizer, steps: range) -> dict[str, Tensor]:
    """Steps with random gradients, of which every second leaves an expert out. This rank's masters
    and state."""
    shards = chosen.shards
    for step in steps:
        for name, gradient in drawn(100 + step, shards.shapes).items():
            if shards.owned(name) and not (step % 2 and name == "layers.0.experts.0.down"):
                chosen.holders[name].grad = gradient[slice(*shards.own(name))].clone()
        chosen.step(0.02 * (step + 1), 0.0)
    masters = {f"{name}|master": p.detach().clone() for name, p in chosen.parameters.items()}
    states = chosen._tensors()
    return masters | {
        f"{name}|{key}": value.clone()
        for name, state in states.items()
        for key, value in state.items()
        if value.ndim
    }


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def jordan(gradient: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """`zeropower_via_newtonschulz5` of https://github.com/KellerJordan/Muon/blob/master/muon.py."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    x = gradient.to(dtype)
    if gradient.size(-2) > gradient.size(-1):
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if gradient.size(-2) > gradient.size(-1) else x


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (128, 128), (33, 65), (1, 7)])
def test_orthogonalized_is_the_published_iteration(shape: tuple[int, int]) -> None:
    """In BF16 it is as near to the iteration in float64 as Jordan's own is. The control has one
    step fewer."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact, theirs = jordan(matrix, 5, torch.float64), jordan(matrix, 5, torch.bfloat16).double()
    for ops in (get_ops("native"), get_ops("reference"), get_ops("reference", "exact")):
        mine = orthogonalized(matrix, 5, ops).double()
        apart = float((mine - exact).norm() / exact.norm())
        assert apart < max(1.5 * float((theirs - exact).norm() / exact.norm()), 4e-3)
        assert (
            float((orthogonalized(matrix, 4, ops).double() - exact).norm() / exact.norm())
            > 4 * apart
        )
    values = torch.linalg.svdvals(mine)  # all but those that began far below the largest
    assert float(values[int(0.9 * len(values))]) > 0.6
    assert float(values.max()) < 1.3


def test_a_gradient_of_zeros_changes_nothing_but_by_decay() -> None:
    assert not orthogonalized(torch.zeros(8, 16), 5, get_ops("native")).any()


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_pytorchs_muon(rule: str, nesterov: bool) -> None:
    """Up to the rounding of BF16, which differs by the order of sums; momentum to a last place.
    Masters move by what `torch.optim.Muon` moves matrices of their own by; the control takes the
    other momentum, or decays with another."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    settings = replace(SETTINGS, adjust_lr=rule, nesterov=nesterov)
    chosen, start = optimizer(settings), drawn(0)
    parts = {
        name: start[name].split(list(MATRICES.get(name, (len(start[name]),)))) for name in start
    }
    theirs = {
        name: [nn.Parameter(part.clone()) for part in parts[name]]
        for name in start
        if start[name].ndim == 2 and name != "embed"
    }
    options: dict[str, Any] = {"momentum": 0.95, "adjust_lr_fn": rule, "weight_decay": 0.1}
    published = torch.optim.Muon(
        [p for each in theirs.values() for p in each], nesterov=nesterov, **options
    )
    for step in range(4):
        for name, gradient in drawn(100 + step).items():
            chosen.holders[name].grad = gradient.clone()
            mine = theirs.get(name, [])
            for p, part in zip(mine, gradient.split([len(p) for p in mine]) if mine else ()):
                p.grad = part.clone()
        published.param_groups[0]["lr"] = 0.02 * (step + 1)
        chosen.step(0.02 * (step + 1), 0.0)
        published.step()
    other = optimizer(replace(settings, nesterov=not nesterov))
    undecayed = optimizer(replace(settings, weight_decay=0.0))
    for control in (other, undecayed):
        for step in range(4):
            for name, gradient in drawn(100 + step).items():
                control.holders[name].grad = gradient.clone()
            control.step(0.02 * (step + 1), 0.0)

    def apart(given: ShardedOptimizer, name: str) -> float:
        wanted = torch.cat([p.detach() for p in theirs[name]])
        return float(
            (given.parameters[name].detach() - wanted).norm() / (wanted - start[name]).norm()
        )

    for name, each in theirs.items():
        assert apart(chosen, name) < 0.015, name
        assert apart(other, name) > 0.1, name
        assert apart(undecayed, name) > 0.015, name
        buffers = torch.cat([published.state[p]["momentum_buffer"] for p in each])
        torch.testing.assert_close(
            chosen._tensors()[name]["momentum_buffer"], buffers, rtol=1e-5, atol=1e-6
        )


def test_the_rate_is_adjusted_as_published() -> None:
    assert adjustment((300, 100), "original") == math.sqrt(3)
    assert adjustment((100, 300), "original") == 1.0
    assert (
        adjustment((300, 100), "match_rms_adamw")
        == adjustment((100, 300), "match_rms_adamw")
        == 0.2 * math.sqrt(300)
    )
    assert COEFFICIENTS == (3.4445, -4.7750, 2.0315)


def test_matrices_of_a_fused_master_are_orthogonalized_one_by_one() -> None:
    """A fused master has the bits of its three as masters of their own. The control takes it as one
    matrix."""
    fused, one = descend(optimizer(), range(2)), descend(optimizer(matrices={}), range(2))
    apart = dict(
        zip(
            ("layers.1.o", "layers.2.o", "layers.3.o"),
            drawn(0)["layers.0.qkv"].split([256, 128, 128]),
        )
    )
    chosen = optimizer(values=apart)
    for step in range(2):
        for name, gradient in zip(apart, drawn(100 + step)["layers.0.qkv"].split([256, 128, 128])):
            chosen.holders[name].grad = gradient.clone()
        chosen.step(0.02 * (step + 1), 0.0)
    joined = torch.cat([p.detach() for p in chosen.parameters.values()])
    assert torch.equal(joined, fused["layers.0.qkv|master"])
    assert not torch.equal(one["layers.0.qkv|master"], fused["layers.0.qkv|master"])


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_moe", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_5_text"]
)
def test_who_updates_what(family: str) -> None:
    """Linear layers by Muon; all else by AdamW."""
    chosen = ShardedOptimizer.of(tiny_model("fp8", family), SETTINGS)
    roles = {name.rpartition(".")[2] for name, kind in chosen._kinds.items() if kind is Muon}
    assert roles == {"qkv", "o", "gate_up", "down"}
    rest = {name.rpartition(".")[2] for name, kind in chosen._kinds.items() if kind is not Muon}
    assert rest >= {"embed", "input_norm", "final_norm"}
    assert rest <= {
        *("embed", "head", "router", "router_bias", "gates", "conv", "decay", "step_bias", "sinks"),
        "layer_scalar",
        *(f"{role}_bias" for role in roles),
        *(
            f"{norm}_norm"
            for norm in ("input", "post", "final", "q", "k", "state", "attention_out", "mlp_out")
        ),
    }
    heights = chosen._masters.matrices
    assert all(sum(heights[name]) == len(p) for name, p in chosen.parameters.items())
    assert {len(heights[name]) for name in chosen.parameters if name.endswith(".qkv")} <= {2, 3, 4}
    assert {len(heights[name]) for name in chosen.parameters if name.endswith("gate_up")} == {2}


@pytest.mark.parametrize("masters", ["fp32", "bf16"])
def test_a_step_is_the_same_bits_on_any_number_of_ranks(
    masters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices whose rows several ranks keep, one turn at a time or all at once. The control
    orthogonalizes the rows that a rank keeps, which are other matrices."""
    settings = replace(SETTINGS, masters=masters)

    def on(ranks: Ranks, matrices: Mapping[str, Sequence[int]] = MATRICES) -> dict[str, Tensor]:
        chosen = optimizer(settings, ranks=ranks, matrices=matrices)
        found = dict[str, list[tuple[int, Tensor]]]()
        for rank, tensors in enumerate(ranks.all_gather_tensors(descend(chosen, range(3)))):
            for name, rows in tensors.items():
                found.setdefault(name, []).append(
                    (chosen.shards.rows[name.partition("|")[0]][rank][0], rows)
                )
        return {
            n: torch.cat([t for _, t in sorted(each, key=lambda e: e[0])])
            for n, each in found.items()
        }

    whole = on(ALONE)
    for size in (1, 2, 3, 4):
        assert sum(hi > lo for lo, hi in ownership(SHAPES, size)["layers.0.qkv"]) == size
        for at_once in (1 << 24, 1):
            monkeypatch.setattr(muon, "AT_ONCE", at_once)
            assert all(same(found, whole) for found in run(size, on)), (size, at_once)

    def by_rows(self: Muon, turn: muon.Turn, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return rows

    monkeypatch.setattr(Muon, "_all_rows", by_rows)
    monkeypatch.setattr(Muon, "_own_rows", by_rows)
    one, two = (run(size, lambda ranks: on(ranks, {}))[0] for size in (1, 2))
    assert same(one, on(ALONE, {})), "alone it has all rows"
    assert not torch.equal(one["layers.0.qkv|master"], two["layers.0.qkv|master"])
    assert torch.equal(one["embed|master"], two["embed|master"]), "AdamW's do not depend on it"


def test_ranks_share_the_work() -> None:
    """Every matrix is assigned to one rank, and no rank has more than another by over the costliest
    one."""
    shapes = {
        f"layers.{i}.{role}": shape
        for i in range(8)
        for role, shape in (("o", (64, 64)), ("down", (64, 256)))
    }
    assigned = muon._assigned(shapes, 3)
    assert sorted(name for names in assigned for name in names) == sorted(shapes)
    assert {sum(name.endswith("down") for name in names) for names in assigned} == {2, 3}


def test_a_step_is_the_same_bits_on_any_number_of_threads() -> None:
    """The control is another step."""
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(descend(optimizer(), range(2)))
    assert same(*found)
    assert not same(found[0], descend(optimizer(), range(1, 3)))


@pytest.mark.parametrize("masters", ["fp32", "bf16"])
def test_state_goes_back_bit_for_bit(masters: str) -> None:
    settings = replace(SETTINGS, masters=masters)
    whole, cut = descend(optimizer(settings), range(4)), optimizer(settings)
    descend(cut, range(2))
    values = {name: p.detach().float().clone() for name, p in cut.parameters.items()}
    again, forgetful = (optimizer(settings, values) for _ in "12")
    again.load_state(cut.state())
    assert same(descend(again, range(2, 4)), whole)
    assert not same(descend(forgetful, range(2, 4)), whole), (
        "the control: without the state it differs"
    )


def test_bytes_are_counted_before_there_are_any() -> None:
    chosen = optimizer()
    counted = sum(bytes_of_state(name, shape, SETTINGS) for name, shape in SHAPES.items())
    assert counted == chosen.nbytes
    descend(chosen, range(1))
    assert counted == sum(
        t.nbytes for key, t in chosen.state().items() if not key.endswith(".step")
    )
    linear = sum(math.prod(s) for n, s in SHAPES.items() if optimizer_type(n, s, SETTINGS) is Muon)
    adamw = optimizer(replace(SETTINGS, name="adamw"))
    assert adamw.nbytes - chosen.nbytes == 4 * linear


def test_another_optimizers_state_is_refused() -> None:
    chosen, adamw = optimizer(), optimizer(replace(SETTINGS, name="adamw"))
    for each in (chosen, adamw):
        descend(each, range(1))
    two = ("adamw, state fp32", "muon")
    for given, into, (its, ours) in ((adamw, chosen, two), (chosen, adamw, two[::-1])):
        line = (
            f"layers.0.qkv is of a run with {its}, and this run trains it with {ours}; a run "
            "goes on with its own"
        )
        with pytest.raises(IsobitError, match=line):
            into.load_state(given.state())
    with pytest.raises(IsobitError, match=r"layers\.0\.o does not fit the model"):
        chosen.load_state(chosen.state() | {"layers.0.o.momentum_buffer": torch.zeros(3, 3)})


def test_a_flipped_bit_is_seen() -> None:
    chosen = optimizer()
    chosen.checksums.begin()
    descend(chosen, range(2))
    chosen.checksums.compare()
    chosen._tensors()["layers.0.o"]["momentum_buffer"].view(torch.uint8).view(-1)[5] ^= 1
    with pytest.raises(Corruption, match=r"momentum_buffer of layers\.0\.o changed"):
        chosen.checksums.compare()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["optimizer={name: muon, state: 8bit}"], "optimizer.state: 8bit is for AdamW's moments"),
        (
            ["optimizer={momentum: 0.9}"],
            "optimizer.momentum is Muon's: set optimizer.name: muon, or leave it out",
        ),
        (["optimizer={adjust_lr: original}"], "optimizer.adjust_lr is Muon's"),
        (
            ["optimizer={name: muon}", "adapter={rank: 2}"],
            "optimizer.name: muon is for whole matrices",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    given: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(IsobitError, match=message):
        load_config(write_config(tmp_path, tmp_path), given)


def settings_of(config: Callable[..., Path], folder: Path, base: Path, **optimizer: object) -> Path:
    folder.mkdir()
    return config(folder, base, optimizer={"name": "muon", "learning_rate": 0.01, **optimizer})


@pytest.mark.slow
@pytest.mark.parametrize("masters", ["fp32", "bf16"])
def test_a_run_goes_on_bit_for_bit_and_not_with_another_optimizer(
    tmp_path: Path, masters: str
) -> None:
    base = tmp_path / "model"
    tiny_model("fp8", hidden_size=64, intermediate_size=128).save(base)
    whole = train(load_config(settings_of(write_config, tmp_path / "whole", base, masters=masters)))
    assert [row["mismatch/differing_tokens"] for row in whole.metrics] == [0.0] * 4
    assert all(row["steps/skipped"] == 0 for row in whole.metrics)
    saved = load_file(whole.run_dir / "checkpoints/step-000004/trainer/optimizer.safetensors")
    assert {key.rpartition(".")[2] for key in saved} == {
        "momentum_buffer",
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    train(
        replace(
            load_config(settings_of(write_config, tmp_path / "cut", base, masters=masters)), steps=2
        )
    )
    resume(tmp_path / "cut/run", ["steps=4"])
    assert fingerprint(tmp_path / "cut/run") == fingerprint(whole.run_dir)
    config = tmp_path / "cut/run/config.yaml"
    config.write_text(config.read_text().replace("name: muon", "name: adamw"))
    with pytest.raises(
        IsobitError, match="is of a run with muon, and this run trains it with adamw"
    ):
        resume(tmp_path / "cut/run", ["steps=5", "run.on_change=warn"])


def test_matrices_move_as_much_as_under_adamw() -> None:
    """With one rate: by a root mean square of about 0.2 of it in each matrix, where AdamW's first
    step moves the embedding by all of it. The control is the other rule, where it depends on the
    matrix's size."""
    model = tiny_model("fp8", hidden_size=64, intermediate_size=128)
    start = {name: p.detach().clone() for name, p in model.named_parameters().items()}
    found = {}
    for rule in ("match_rms_adamw", "original"):
        chosen = ShardedOptimizer.of(model, OptimizerSettings(name="muon", adjust_lr=rule))
        for name, gradient in drawn(1, {n: tuple(p.shape) for n, p in start.items()}).items():
            chosen.parameters[name].data.copy_(start[name])
            chosen.holders[name].grad = gradient
        chosen.step(1.0, 0.0)
        moved = {
            n: float((p.detach() - start[n]).square().mean().sqrt())
            for n, p in chosen.parameters.items()
        }
        found[rule] = [value for name, value in moved.items() if chosen._kinds[name] is Muon]
        assert moved["embed"] == pytest.approx(1.0, rel=0.01)
    assert all(0.15 < value < 0.25 for value in found["match_rms_adamw"])
    assert not any(0.15 < value < 0.25 for value in found["original"])
