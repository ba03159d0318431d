"""BF16 masters: an update is float32 on average, its bits repeat, and a run with them keeps all
that it promises."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from isobit.config import load_config
from isobit.distributed import ALONE, Shards
from isobit.errors import Corruption, IsobitError
from isobit.kernels import Ops, get_ops
from isobit.kernels.backends.reference import ReferenceOps
from isobit.model.weights.masters import Masters
from isobit.rl import OptimizerSettings
from isobit.rl.optim import masters
from isobit.rl.optim.masters import UpdatedMasters
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.training.plan.live_bytes import LiveBytes
from isobit.training.train import resume, train
from tests.models import tiny_model
from tests.runs import fingerprint, write_config

SHAPES = {"large": (64, 128), "ragged": (63, 65), "norm": (300,), "other": (64, 128)}
SETTINGS = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, masters="bf16")


class Nearest(ReferenceOps):
    """The control: rounding to nearest."""

    def round_stochastically(self, x: Tensor, seed: int, step: int, first: int) -> Tensor:
        return x.bfloat16()


def optimizer(
    settings: OptimizerSettings = SETTINGS,
    values: Mapping[str, Tensor] | None = None,
    ops: Ops | None = None,
) -> ShardedOptimizer:
    generator = torch.Generator().manual_seed(0)
    given = values or {
        name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()
    }
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    masters = Masters(given, shapes, torch.device("cpu"), ALONE, torch.bfloat16)
    return ShardedOptimizer(
        masters.parameters, settings, Shards.of(shapes), ops or get_ops("native"), masters.holders
    )


def descend(optimizer: ShardedOptimizer, steps: int, first: int = 0) -> dict[str, Tensor]:
    """Steps down a quadratic with some noise; returns the masters."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in optimizer.parameters.items():
            noise = torch.randn(parameter.shape, generator=generator)
            optimizer.holders[name].grad = parameter.detach().float() + 0.1 * noise
        optimizer.step(optimizer.settings.learning_rate, 0.0)
    return {name: parameter.detach().clone() for name, parameter in optimizer.parameters.items()}


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def drift(ops: Ops, state: str, steps: int = 128, rate: float = 2.0**-13) -> tuple[float, float]:
    """By how much masters of -1 move on average, and how far apart they end, where AdamW's update
    is the rate. (Moments in 8 bits have a code for the largest positive number, and for no such
    negative one.)"""
    settings = OptimizerSettings(learning_rate=rate, masters="bf16", state=state)
    chosen = optimizer(settings, {"w": -torch.ones(64, 128)}, ops)
    for _ in range(steps):
        chosen.holders["w"].grad = torch.ones(64, 128)
        chosen.step(rate, 0.0)
    moved = -1 - chosen.parameters["w"].detach().double()
    return float(moved.mean()), float(moved.std())


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_small_updates_move_masters_by_what_they_are_on_average(state: str) -> None:
    """A step is 1/64 of BF16's last place above 1: 128 of them are two places. Each of 8,192
    masters takes a binomial number of places, so the mean is right to five deviations."""
    wanted = 128 * 2.0**-13
    mean, deviation = drift(get_ops("native"), state)
    expected = (128 * (1 / 64) * (63 / 64)) ** 0.5 * 2**-7
    assert abs(mean - wanted) < 5 * expected / 8192**0.5
    assert deviation == pytest.approx(expected, rel=0.1)
    assert drift(Nearest("exact", "the control"), state) == (0.0, 0.0)


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_parts_threads_and_backends_have_the_same_bits(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(SETTINGS, state=state)
    whole = descend(optimizer(settings), 4)
    assert all(master.dtype == torch.bfloat16 for master in whole.values())
    assert same(descend(optimizer(settings, ops=get_ops("reference")), 4), whole)
    for at_once in (1024, 8192, 100_000):
        monkeypatch.setattr(masters, "AT_ONCE", at_once)
        assert same(descend(optimizer(settings), 4), whole), at_once
    torch.set_num_threads(2)
    assert same(descend(optimizer(settings), 4), whole)


def test_control_elements_numbered_from_their_part_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the test before this one would see if the random bits were those of a place in a
    group."""
    whole, put = descend(optimizer(), 2), UpdatedMasters.put

    def wrong(self: UpdatedMasters, name: str, part: slice, values: Tensor, step: int) -> None:
        rows = self.parameters[name].detach().view(-1)[part]
        rows.copy_(
            self.ops.round_stochastically(
                values, masters._key(f"masters {self.seed} {name}"), step, 0
            )
        )

    monkeypatch.setattr(masters, "AT_ONCE", 1024)
    assert same(descend(optimizer(), 2), whole)
    monkeypatch.setattr(UpdatedMasters, "put", wrong)
    found = descend(optimizer(), 2)
    assert not torch.equal(found["large"], whole["large"])
    assert torch.equal(found["norm"], whole["norm"])  # all of it in one part
    assert put is not wrong


def test_seeds_steps_and_names_round_differently() -> None:
    """The same numbers, twice under two names: equal bits would be equal noise. The update itself
    is the same."""
    values = {name: torch.full((64, 128), 1.0) for name in ("a", "b")}
    found = {
        seed: descend(optimizer(dataclasses.replace(SETTINGS, seed=seed), values), 1)
        for seed in (0, 1)
    }
    again = descend(optimizer(SETTINGS, values), 1)
    assert same(found[0], again)
    for name in values:
        assert not torch.equal(found[0][name], found[1][name])

    def moved(steps: int) -> Tensor:
        chosen = optimizer(
            OptimizerSettings(learning_rate=2.0**-9, masters="bf16"), {"w": torch.ones(64, 128)}
        )
        for _ in range(steps):
            chosen.holders["w"].grad = torch.full((64, 128), -1.0)
            with torch.no_grad():
                chosen.parameters["w"].fill_(1.0)
            chosen.step(2.0**-9, 0.0)
        return chosen.parameters["w"].detach() > 1

    assert 0.2 < float(moved(1).double().mean()) < 0.3
    assert not torch.equal(moved(1), moved(2))
    assert (
        0.02 < float((moved(1) & moved(2)).double().mean()) < 0.12
    )  # 1/16 if they are independent
    twin = optimizer(OptimizerSettings(learning_rate=2.0**-9, masters="bf16"), values)
    for name in values:
        twin.holders[name].grad = torch.full((64, 128), -1.0)
    twin.step(2.0**-9, 0.0)
    assert not torch.equal(twin.parameters["a"], twin.parameters["b"])


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_state_goes_back_bit_for_bit(state: str) -> None:
    settings = dataclasses.replace(SETTINGS, state=state)
    whole, cut = descend(optimizer(settings), 6), optimizer(settings)
    masters = descend(cut, 3)
    again, forgetful = (
        optimizer(settings, {name: master.float() for name, master in masters.items()})
        for _ in "12"
    )
    again.load_state(cut.state())
    assert same(descend(again, 3, 3), whole)
    assert not same(descend(forgetful, 3, 3), whole), (
        "the control: its updates are counted from 0 again"
    )


def test_masters_are_in_float32_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside moments and gradients; the control has all of them in one part."""
    taken = {}
    for at_once in (1 << 10, 1 << 20):
        monkeypatch.setattr(masters, "AT_ONCE", at_once)
        with LiveBytes() as live:
            chosen = optimizer()
            descend(chosen, 1)  # makes the moments
            for name, parameter in chosen.parameters.items():
                chosen.holders[name].grad = torch.ones(parameter.shape)
            live.take()
            before = live.live
            chosen.step(1e-2, 0.0)
            taken[at_once] = live.take() - before
    count = sum(parameter.numel() for parameter in chosen.parameters.values())
    assert taken[1 << 10] < 8 * (1 << 10)
    assert taken[1 << 20] > 4 * count
    assert sum(p.numel() * p.element_size() for p in chosen.parameters.values()) == 2 * count


@pytest.mark.slow
def test_a_run_rolls_out_what_it_learns_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Its checkpoints are in BF16, and a run with other masters does not go on from them."""
    base = tmp_path / "model"
    tiny_model("fp8", hidden_size=64, intermediate_size=128).save(base)
    for name in ("whole", "cut", "plain"):
        (tmp_path / name).mkdir()
    settings = {
        "optimizer": {"masters": "bf16", "state": "8bit"},
        "algorithm": {"updates_per_batch": 2},
    }
    whole = train(load_config(write_config(tmp_path / "whole", base, **settings)))
    assert [row["mismatch/differing_tokens"] for row in whole.metrics] == [0.0] * 4
    assert all(row["steps/skipped"] == 0 for row in whole.metrics)
    saved = load_file(whole.run_dir / "checkpoints/step-000004/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    plain = train(load_config(write_config(tmp_path / "plain", base, steps=1)))
    gone = plain.metrics[0]["memory/weights_mib"] - whole.metrics[0]["memory/weights_mib"]
    assert gone == 2 * sum(tensor.numel() for tensor in saved.values()) / 2**20
    train(
        dataclasses.replace(load_config(write_config(tmp_path / "cut", base, **settings)), steps=2)
    )
    resume(tmp_path / "cut/run", ["steps=4"])
    assert fingerprint(tmp_path / "cut/run") == fingerprint(whole.run_dir)
    for name, its, given in (("cut", "bf16", "fp32"), ("plain", "fp32", "bf16")):
        config = tmp_path / name / "run/config.yaml"
        config.write_text(config.read_text().replace(f"masters: {its}", f"masters: {given}"))
        with pytest.raises(
            IsobitError, match=f"its masters are {its}, and optimizer.masters is {given}; a run"
        ):
            resume(tmp_path / name / "run", ["steps=5", "run.on_change=warn"])


def test_an_adapters_factors_are_masters_too(tmp_path: Path) -> None:
    base = tmp_path / "model"
    tiny_model("fp8").save(base)
    changes = {
        "adapter": {"rank": 4, "alpha": 8},
        "optimizer": {"masters": "bf16", "learning_rate": 0.02},
        "steps": 2,
    }
    found = train(load_config(write_config(tmp_path, base, **changes)))
    assert [row["mismatch/differing_tokens"] for row in found.metrics] == [0.0] * 2
    factors = load_file(found.run_dir / "checkpoints/step-000002/adapter_model.safetensors")
    assert all(torch.equal(factor, factor.bfloat16().float()) for factor in factors.values())
    assert any(factor.any() for name, factor in factors.items() if "lora_B" in name), (
        "B begins at 0"
    )


def test_a_reference_that_is_the_policy_costs_nothing(tmp_path: Path) -> None:
    """Though the weights read are in FP32: it is of the rounded ones too."""
    base = tmp_path / "model"
    tiny_model("float32", scale=4).save(base)
    changes = {"algorithm": {"kl_coefficient": 0.1}, "precision": "float32", "steps": 2}
    found = train(
        load_config(write_config(tmp_path, base, optimizer={"masters": "bf16"}, **changes))
    )
    assert found.metrics[0]["loss/kl"] == 0.0
    assert found.metrics[1]["loss/kl"] > 0.0


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_a_flipped_bit_is_seen(state: str) -> None:
    chosen = optimizer(dataclasses.replace(SETTINGS, state=state))
    chosen.checksums.begin()
    descend(chosen, 2)
    chosen.checksums.compare()
    chosen.parameters["ragged"].data.view(torch.int16).view(-1)[5] ^= 1
    with pytest.raises(Corruption, match="master ragged changed"):
        chosen.checksums.compare()
