"""Whole runs whose working weights a group of ranks holds together: the bits of one process, at any
number of ranks and of those that hold a model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit import Model
from isobit.model.weights.divided import DividedWeights
from tests.distributed.sessions import bits, resumed, session
from tests.distributed.test_by_rows import ALPHABET, SIZES
from tests.distributed.threads import run
from tests.models import slow_where, tiny_model
from tests.runs import write_config

SMALL = ["optimizer.micro_batch_tokens=32", "run.quantization_every=2", "engine.kv_pages=32"]
LAYOUTS = [(1, 1), (2, 2), (3, 3), (4, 2), (4, 4)]
"""(ranks, how many of them hold a model together)."""
Bits = dict[str, Any]


def written(folder: Path, tied: bool = False, **changes: object) -> Path:
    """A config whose model four ranks can hold together."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model("bf16", "qwen3", 5, ALPHABET, "auto", 3.0, tie_embeddings=tied, **SIZES)
    model.save(folder / "base")
    config = write_config(folder, folder / "base", **changes)
    (folder / "digit_reward.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(ord(c) % 5 for c in text) / 9 for text in completions]\n"
    )
    return config


@contextmanager
def held_by(size: int) -> Iterator[None]:
    """Models that are loaded inside are held by groups of so many ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "load", staticmethod(partial(Model.load, divided=size)))
        yield


def trained(
    config: Path, out: Path, layout: tuple[int, int], overrides: Sequence[str] = ()
) -> Bits:
    """The bits of a new run in a layout; (0, 0): without any code of ranks."""
    ranks, group = layout
    given = [*SMALL, *overrides, f"run.dir={out}"]
    if ranks == 0:
        session(config, given)
    else:
        with held_by(group):
            run(ranks, lambda each: session(config, given, each))
    return bits(out)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bits]:
    """A config, and the bits of its run in one process."""
    folder = tmp_path_factory.mktemp("one")
    config = written(folder, steps=3)
    return config, trained(config, folder / "alone", (0, 0))


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is closed is NaN instead of without memory, and so is what was not gathered."""

    def close(weights: DividedWeights, part: str) -> None:
        for tensor in weights._parts[part].tensors:
            tensor.whole.view(torch.uint8).fill_(0xFF)

    monkeypatch.setattr(DividedWeights, "_close", close)


@pytest.mark.parametrize(("ranks", "group"), slow_where(LAYOUTS, lambda *layout: layout != (4, 2)))
def test_a_run_has_the_bits_of_one_process(
    tmp_path: Path, one: tuple[Path, Bits], ranks: int, group: int
) -> None:
    """Weights, moments, completions and all metrics but times; what is closed has no memory."""
    config, alone = one
    assert trained(config, tmp_path / "run", (ranks, group)) == alone


def test_nothing_closed_is_read(tmp_path: Path, one: tuple[Path, Bits], poison: None) -> None:
    config, alone = one
    assert trained(config, tmp_path / "run", (2, 2)) == alone


VARIANTS: dict[str, tuple[bool, Sequence[str]]] = {
    "tied, bf16": (True, ["precision=bf16", "optimizer.activation_checkpointing=true"]),
    "tied, fp8": (True, ["optimizer.gradient_sum_group=2", "evaluation.every=2"]),
    "bf16": (False, ["precision=bf16", "algorithm.updates_per_batch=2"]),
    "checked gradients": (False, ["run.check_gradients_every=1", "optimizer.masters=bf16"]),
    "mxfp8": (False, ["precision=mxfp8", "rollouts_ahead=1"]),
    "self-distillation": (
        False,
        [
            "algorithm={advantage: distillation, kl_coefficient: 1, kl_in_reward: true}",
            "algorithm.loss=divergence",
            "reference={weights: policy, shown: {success: 0.3, template: '{shown}{prompt}'}}",
        ],
    ),
    "reference": (False, ["algorithm.kl_coefficient=0.1"]),
    "partial": (True, ["partial={tokens_per_round: 1, extra_prompts: 3}"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_of_all_kinds_have_the_bits_of_one_process(
    tmp_path: Path, variant: str, layout: tuple[int, int]
) -> None:
    tied, overrides = VARIANTS[variant]
    config = written(tmp_path, tied, steps=2)
    alone = trained(config, tmp_path / "alone", (0, 0), overrides)
    assert trained(config, tmp_path / "run", layout, overrides) == alone


def test_a_run_goes_on_in_other_layouts(tmp_path: Path, one: tuple[Path, Bits]) -> None:
    """Four that hold one model, then three that hold one each, then one process alone; the control
    is another seed."""
    config, alone = one
    directory = tmp_path / "elastic"
    given = [*SMALL, f"run.dir={directory}", "steps=1"]
    with held_by(4):
        run(4, lambda each: session(config, given, each))
    run(3, partial(resumed, directory, ["steps=2"]))
    resumed(directory, ["steps=3"])
    assert bits(directory) == alone
    assert trained(config, tmp_path / "control", (2, 2), ["seed=1"]) != alone
