"""A small finished run of each kind, for what must hold of all of them: no honest run is accused,
every one can be looked at, and sent to every tracker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from isobit.config import load_config, load_sft_config
from isobit.training.train import replay, train, train_supervised
from tests.models import tiny_model
from tests.runs import write_config
from tests.training import test_distillation as distillation
from tests.training.test_kto_run import labelled
from tests.training.test_partial import PARTIAL
from tests.training.test_preference_run import pairs
from tests.training.test_sft_run import written
from tests.training.test_turns import config_of, save_chat_model

Make = Callable[[Path, Path], Path]
"""(a folder of its own, the model) to the run directory."""
BRIEF = ("steps=2", "optimizer.warmup_steps=0")
EVALUATED: dict[str, Any] = {"every": 1, "samples": 4}


def _sampled(**changes: Any) -> Make:
    def make(folder: Path, model: Path) -> Path:
        values = {"evaluation": EVALUATED, "steps": 2, **changes}
        return train(load_config(write_config(folder, model, **values)), quiet=True).run_dir

    return make


def _supervised(write: Callable[..., Path], **changes: Any) -> Make:
    def make(folder: Path, model: Path) -> Path:
        config = load_sft_config(write(folder, model, **changes), [*BRIEF, "evaluation.every=1"])
        return train_supervised(config, quiet=True).run_dir

    return make


def _turns(folder: Path, model: Path) -> Path:
    path = config_of(folder, save_chat_model(folder / "chat"), evaluation=EVALUATED, steps=2)
    return train(load_config(path), quiet=True).run_dir


def _distilled(folder: Path, model: Path) -> Path:
    teacher = folder / "teacher"
    tiny_model("fp8", seed=9, scale=6.0).save(teacher)
    path = distillation.written(folder, model, teacher)
    return train(load_config(path, ["steps=2"]), quiet=True).run_dir


def _replayed(folder: Path, model: Path) -> Path:
    first = _sampled()(folder, model)
    return replay(first, folder / "again", quiet=True).run_dir


KINDS: dict[str, Make] = {
    "rl": _sampled(),
    "turns": _turns,
    "sft": _supervised(written),
    "sft, an adapter": _supervised(written, adapter={"rank": 2}),
    "sft from nothing": lambda folder, model: _supervised(written)(folder, None),  # type: ignore[arg-type]
    "dpo": _supervised(pairs),
    "kto": _supervised(labelled),
    "distillation": _distilled,
    "partial": _sampled(**PARTIAL, evaluation=EVALUATED),
    "curriculum": _sampled(curriculum={"mode": "skip", "floor": 0.2}, steps=16),
    "an early stop": _sampled(
        evaluation={**EVALUATED, "stop_by": "accuracy/held_out", "stop_at": 0.0}
    ),
    "the best": _sampled(evaluation={**EVALUATED, "keep_best": True}),
    "replayed": _replayed,
    "calibrated": _sampled(precision="fp8-rollout-kv"),
    "scales of 1": _sampled(precision="fp8[kv_cache=e4m3-calibrated, kv_calibration=never]"),
}
SUPERVISED = ("sft", "sft, an adapter", "sft from nothing", "dpo", "kto")
