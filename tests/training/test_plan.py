"""The memory plan: what it counts, what it advises, and `optimizer.micro_batch_tokens: auto`."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from isobit.cli.commands.dry_run import dry_run
from isobit.config import load_config
from isobit.engine import engine
from isobit.errors import IsobitError
from isobit.model import Experts, Model
from isobit.model.forward.recompute import Recompute
from isobit.training.memory import forecast, host, plan
from isobit.training.memory.live_bytes import LiveBytes
from isobit.training.parts import Parts
from isobit.training.session.assembly import open_parts
from isobit.training.train import resume, train
from tests.models import tiny_model
from tests.runs import dry_run_text, write_config

_AUTO = "optimizer.micro_batch_tokens=auto"


def _parts(folder: Path, model: Path, *overrides: str) -> Parts:
    parts = open_parts(load_config(write_config(folder, model), overrides), quiet=True)
    parts.rewards.close()
    return parts


def _memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (plan, forecast):
        monkeypatch.setattr(module, "memory_limit", lambda device: (size, "memory of this machine"))


def test_live_bytes_are_those_of_storages() -> None:
    kept = torch.ones(1000)
    with LiveBytes() as meter:
        made = kept * 2
        view = made[:10]
        del made
        assert (meter.live, meter.peak) == (4000, 4000)
        other = (kept.double() + 1).float()
        assert meter.live == 8000
        assert meter.take() == 4000 + 8000 + 8000
        del view, other
    assert meter.live == 0
    assert meter.peak == 8000


def test_more_tokens_take_more_in_straight_lines(tmp_path: Path, base_model: Path) -> None:
    """What is measured on 8 and 24 tokens says what 200 take, to 15 %."""
    parts = _parts(tmp_path, base_model)
    learning = plan.measure_parts(parts)
    assert learning.at(200) == pytest.approx(_peak(parts.model, 200, False), rel=0.15)
    assert learning.at(200) > 3 * learning.at(24) > 0


@pytest.mark.parametrize("experts", [None, Experts(5, 2, 96), Experts(64, 2, 16), Experts(16, 8, 24)])
def test_few_tokens_say_what_many_take(experts: Experts | None) -> None:
    """To 3 %, whether few of the experts have rows of a few tokens or all, and wherever in a pass few take most."""
    family = "qwen3" if experts is None else "qwen3_moe"
    model = tiny_model("fp8", family, max_positions=2048, **({} if experts is None else {"experts": experts}))
    for recompute in ("mlp", True):
        learning = plan.measure(model, recompute)
        assert learning.at(2048) == pytest.approx(_peak(model, 2048, recompute), rel=0.03)
        assert learning.at(1024) < 0.6 * learning.at(2048), "the control"


def _peak(model: Model, tokens: int, recompute: Recompute) -> int:
    return max(map(max, plan._pass(model, tokens, min(tokens, 200), recompute)))


def test_the_total_is_what_is_held_and_the_largest_part(tmp_path: Path, base_model: Path) -> None:
    parts = _parts(tmp_path, base_model)
    found = plan.plan(parts, plan.measure_parts(parts), 1000, 100)
    held, during = dict(found.held), dict(found.parts)
    masters = 4 * sum(p.numel() for p in parts.model.parameters())
    assert held["FP32 masters"] == masters
    assert held["AdamW moments"] == 2 * masters
    assert held["Python and its libraries"] == 1000
    assert during["saving: a copy of masters or moments"] == 2 * masters
    assert found.total == sum(held.values()) + max(during.values())
    narrow = _parts(tmp_path, base_model, "optimizer.masters=bf16")
    other = plan.plan(narrow, plan.measure_parts(narrow), 1000, 100)
    del held["FP32 masters"]
    assert dict(other.held) == {"BF16 masters": masters // 2, **held}
    assert other.parts[0] == found.parts[0], "gradients and activations are what they were"
    assert dict(other.parts)["updating: gradients, their norm, the moments' values"] == masters * 5 // 2


def test_caches_are_sized_beside_moments_and_gradients_that_do_not_exist_yet(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(engine, "_most_cache_bytes", lambda device, reserved: asked.append(reserved) or 1 << 20)
    parts = _parts(tmp_path, base_model, "evaluation.every=1")
    masters = sum(p.numel() for p in parts.model.parameters())
    assert asked == [12 * masters] * 2  # two moments and a gradient, in FP32; for the rollout and for the evaluation


def test_activation_checkpointing_lowers_the_plan(tmp_path: Path) -> None:
    sizes = []
    tiny_model(num_layers=8).save(tmp_path / "deep")
    for given in ("false", "true"):
        parts = _parts(tmp_path, tmp_path / "deep", f"optimizer.activation_checkpointing={given}")
        sizes.append(plan.measure_parts(parts).at(4096))
    assert sizes[1] < 0.6 * sizes[0]


def test_a_plan_that_does_not_fit_names_the_keys_that_lower_it(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with the total that a plan with this key has."""
    many = ("prompts_per_step=64", "optimizer.micro_batch_tokens=4096")
    parts = _parts(tmp_path, base_model, *many)
    learning = plan.measure_parts(parts)
    total = plan.plan(parts, learning, 0, 4096).total
    _memory(monkeypatch, total)
    assert plan.advice(parts, learning, 0).startswith("fits: ")
    _memory(monkeypatch, total - 1)
    text = plan.advice(parts, learning, 0)
    assert text.startswith("does not fit: ")
    lines = dict(re.findall(r"^  (\S+?)=\S+ +([\d.]+ GiB)(?:, fits)?$", text, re.M))
    keys = ["optimizer.micro_batch_tokens", "optimizer.activation_checkpointing"]
    keys += ["optimizer.masters", "prompts_per_step"]  # 8-bit blocks are larger than this model's matrices
    assert list(lines) == keys
    assert all(line.endswith(", fits") for line in text.splitlines()[1:])


def test_a_dry_run_compares_with_what_is_there(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shapes first, and again when the weights are there; where they are too large they are not read."""
    config = load_config(write_config(tmp_path, base_model))
    fits = r"^fits: [\d.]+ GiB of [\d.]+ GiB \(memory of"
    assert len(re.findall(fits, dry_run_text(config), re.M)) == 2
    said: list[str] = []
    _memory(monkeypatch, 1 << 20)
    with pytest.raises(IsobitError, match="the rest of the check, which needs them, is left out"):
        dry_run(config, said.append)
    assert "does not fit" in said[-2]
    assert "first prompt" in said[-1]
    assert not re.search(fits, "\n".join(said), re.M)
    assert "counted from the weights" not in "\n".join(said)


def test_a_run_that_cannot_fit_says_so_before_it_reads_weights(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(write_config(tmp_path, base_model))

    def said() -> str:
        def read(*_: object) -> Model:
            raise IsobitError("no weights are read here")

        monkeypatch.setattr("isobit.training.session.assembly.load_trained", read)
        with pytest.raises(IsobitError, match="no weights are read here"):
            open_parts(config, quiet=False)
        return capsys.readouterr().err

    assert said() == ""
    _memory(monkeypatch, 1 << 10)
    line = said()
    assert "this run will not fit" in line
    assert line.count("\n") == 1


def test_auto_takes_what_fits_and_a_resumed_run_repeats_it(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More memory, more tokens, up to the batch; the number is in config.yaml, and stays when the memory changes."""
    parts = _parts(tmp_path, base_model, "prompts_per_step=200")
    learning = plan.measure_parts(parts)

    def auto(size: int) -> int:
        _memory(monkeypatch, size)
        return _parts(tmp_path, base_model, "prompts_per_step=200", _AUTO).micro_batch_tokens

    for tokens in (256, 1024):
        needed = plan.plan(parts, learning, plan._PROCESS, tokens).total
        assert auto(int(needed / 0.9) + 4096) == tokens
    whole = 200 * 4 * plan.longest_sequence(parts)
    assert auto(1 << 40) == -(-whole // 128) * 128
    with pytest.raises(IsobitError, match=r"one sequence of .* tokens needs .* GiB, more than 90 %"):
        auto(1 << 20)
    _memory(monkeypatch, 1 << 40)
    config = load_config(write_config(tmp_path, base_model), [_AUTO, "steps=1"])
    run = Path(train(config, quiet=True).run_dir)
    number: Any = yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["micro_batch_tokens"]
    assert number == 128
    _memory(monkeypatch, 1 << 20)
    resume(run, ["steps=2"], quiet=True)
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["micro_batch_tokens"] == number


def test_the_smallest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's, where it has one; `max` is none."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "_CGROUPS", (str(limit),))
    machine = host.memory_limit(torch.device("cpu"))
    assert machine[1] == "memory of this machine"
    limit.write_text("max\n")
    assert host.memory_limit(torch.device("cpu")) == machine
    limit.write_text("1000000\n")
    assert host.memory_limit(torch.device("cpu")) == (1_000_000, "memory of this container")
    assert 1 << 20 < host.resident_bytes() < 1 << 40
