"""What a run consists of, and what a checkpoint holds of it beside its counters (`saving/snapshot.py`). Left out: how
it is opened (`session/assembly.py`)."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from isobit.config import Config
from isobit.data.foreign import BadJson, check_readable, exists, parse_json, read_bytes, reason_of
from isobit.distributed import ALONE, Ranks
from isobit.distributed.files import Part, file_tensors, write_file
from isobit.engine.calibration import Calibrator
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import IsobitError, brief
from isobit.evaluation.best import is_description
from isobit.evaluation.periodic import HeldOut
from isobit.fleet.fleet import Fleet
from isobit.kernels import computed_by
from isobit.model import Model
from isobit.model.weights.checksums import Checksums
from isobit.options.consistency import default_order
from isobit.rewards.pool import RewardPool
from isobit.rl import Objective
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.functions import digests
from isobit.rl.algorithm.replay import ReplayBuffer
from isobit.rl.algorithm.samples import groups_from_json
from isobit.rl.learner.learner import Learner, LearnerState
from isobit.rl.optim.adamw import Optimizer
from isobit.run import checkpoints
from isobit.run.certificate import GENESIS
from isobit.run.directory import METRICS, NOTHING_WRITTEN
from isobit.tasks import Task
from isobit.training.scoring import Scorer

_COUNTS = ("step", "cursor", "weights_version", "bad_steps_in_a_row")
_MIB, _MOST_HEAD_BYTES = 1024 * 1024, 4096
_HASH = re.compile("[0-9a-f]{64}")
_TRAINER = "trainer"
MASTERS = "fp32"
"""What `optimizer.masters` is where a checkpoint does not say."""
_OPTIMIZER, _KV, _HEAD = "optimizer.safetensors", "kv_scales.safetensors", "certificate.json"


@dataclass(frozen=True, eq=False)
class Parts:
    """What a run consists of. `engine` rolls out, or the engines of a `fleet` instead; that of `held_out` answers its
    prompts. `engine` and that one share the weights."""

    config: Config
    ranks: Ranks
    model: Model
    reference: Model | None
    task: Task
    held_out: HeldOut | None
    rewards: RewardPool
    scorer: Scorer
    engine: Engine
    calibrator: Calibrator
    replay: ReplayBuffer
    sampling: Sampling
    objective: Objective
    optimizer: Optimizer
    learner: Learner
    fleet: Fleet | None = None

    @property
    def micro_batch_tokens(self) -> int:
        """As resolved: `auto` is a number here, which the run's config.yaml keeps."""
        return self.learner.micro_batch_tokens

    @property
    def kv_bytes(self) -> int:
        """Allocated for keys and values."""
        return self.engine.kv_bytes + (self.held_out.engine.kv_bytes if self.held_out is not None else 0)

    @property
    def reference_bytes(self) -> int:
        """Of the reference's weights and packs: none where it is the policy without its adapter."""
        if self.reference is None or self.config.shares_reference:
            return 0
        return sum(self.reference.memory().values()) + self.reference.transformer.packed_bytes()

    def sleep(self) -> None:
        """Before learning: free the memory of the caches, where `engine.sleep` says so."""
        wanted = self.config.engine.sleep
        for engine in (self.engine, *(() if self.held_out is None else (self.held_out.engine,))):
            idle = self.model.ops.device.type == "cuda" and not engine.captures
            if wanted == "always" or (wanted == "auto" and idle):
                engine.sleep()

    def keep_checksums(self) -> None:
        """From now on notice a bit that changes in the masters, the optimizer's moments and all working weights."""
        for kept in (self.model.transformer.checksums, *self._saved_with()):
            kept.begin()

    def check_saved(self) -> None:
        """Raise Corruption, on every rank, if on one what a checkpoint holds has changed in memory, or a frozen model
        that it was learned with. Not the policy's working weights, which the learner compares before it learns
        (`Learner.check_memory`)."""

        def compare() -> None:
            for kept in self._saved_with():
                kept.compare()

        self.ranks.run_on_all(compare)

    def _saved_with(self) -> list[Checksums]:
        frozen = [m.model.transformer for m in self.scorer.models]
        if self.reference is not None:
            frozen.append(self.reference.transformer)
        return [self.optimizer.checksums, *(transformer.checksums for transformer in frozen)]

    def save_model(self, folder: Path) -> None:
        """A Hugging Face directory of the masters; of a BF16 model that has not learned yet in BF16, which loses
        nothing. Of an adapter a PEFT folder."""
        narrow = all(bool((rows.bfloat16() == rows).all()) for rows in self.model.named_parameters().values())
        self.model.save(folder, torch.bfloat16 if all(self.ranks.all_gather_json(narrow)) else torch.float32)
        self.check_saved()  # after it was written: what changed while it was is noticed too

    def machine(self) -> dict[str, object]:
        """What the run is computed by."""
        ops = self.model.ops
        facts: dict[str, object] = {"why": ops.why, **computed_by(ops), "formats": self.model.precision.formats()}
        facts["date"] = self.model.tokenizer.now.isoformat()  # which prompts may have in them
        facts["bitwise"] = default_order()  # what a config means here that names no order, such as model.sft's
        if functions := digests(self.objective):
            facts["functions"] = functions
        return facts

    def memory_metrics(self) -> dict[str, float]:
        """Allocated for keys and values, and for weights, in MiB."""
        found = {
            "memory/kv_cache_mib": self.kv_bytes / _MIB,
            "memory/weights_mib": sum(self.model.memory().values()) / _MIB,
            "memory/optimizer_mib": self.optimizer.nbytes / _MIB,
        }
        if self.reference is not None and not self.config.shares_reference:
            found["memory/reference_mib"] = sum(self.reference.memory().values()) / _MIB
        if self.scorer.models:
            found["memory/reward_models_mib"] = sum(m.model.nbytes() for m in self.scorer.models) / _MIB
        return found


def save_checkpoint(
    directory: Path,
    parts: Parts,
    state: dict[str, Any],
    scales: Mapping[str, torch.Tensor],
    head: str,
    keep_last: int,
) -> Path:
    """A directory of the masters (`Parts.save_model`), with optimizer, state, a calibrated cache's scales and the hash
    of the certificate's newest row beside it. Every rank writes what it keeps, the first one what all have."""
    ranks = parts.ranks

    def write_rest(trainer: Path) -> None:
        trainer.mkdir()
        if parts.calibrator.active:
            write_file(trainer / _KV, {name: Part.whole(tensor) for name, tensor in scales.items()})
        (trainer / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
        (trainer / _HEAD).write_text(json.dumps({"step": state["step"], "hash": head}) + "\n", encoding="utf-8")

    def write(folder: Path) -> None:
        trainer = folder / _TRAINER
        ranks.on_first(lambda: write_rest(trainer))
        write_file(trainer / _OPTIMIZER, parts.optimizer.parts(), ranks)
        parts.save_model(folder)

    return checkpoints.save(directory, state["step"], write, keep_last, ranks)


def not_finite(model: Model) -> str | None:
    """The first master that holds NaN or infinity, on any rank, or None."""
    mine = [name for name, rows in model.named_parameters().items() if not bool(rows.isfinite().all())]
    found = {name for names in model.ranks.all_gather_json(mine) for name in names}
    return next((name for name in model.transformer.masters.shards.shapes if name in found), None)


def problem_of(checkpoint: Path, ranks: Ranks = ALONE) -> str | None:
    """Why a run cannot go on from a checkpoint that is whole, or None: a weight is not finite, or its state is not one.
    The ranks share the weights, and all return the same."""
    found = ranks.all_gather_json(ranks.run_on_all(lambda: _broken_weight(checkpoint, ranks)))
    found += ranks.all_gather_json(ranks.on_first(lambda: _broken_state(checkpoint)))
    return next((problem for problem in found if problem is not None), None)


def _broken_state(checkpoint: Path) -> str | None:
    try:
        _state(checkpoint)
    except IsobitError as error:
        return str(error)
    return None


def _broken_weight(checkpoint: Path, ranks: Ranks) -> str | None:
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name, tensor in list(file_tensors(file).items())[ranks.rank :: ranks.size]:
                if not bool(tensor[...].isfinite().all()):
                    return f"{name} in {path.name} is not finite"
    return None


def _state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / _TRAINER / "state.json"
    try:
        check_readable(path)
        found = json.loads(path.read_text(encoding="utf-8"))
        counts = [*(found[name] for name in _COUNTS), found.get("rows", 0), *found["offsets"].values()]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise TypeError
        if not set(found["offsets"]) <= set(NOTHING_WRITTEN) or not ("rows" in found or METRICS in found["offsets"]):
            raise TypeError  # a run cuts files of its own, and no others
        for name in ("pending", "replay"):
            groups_from_json(found[name])
        for batch in found["queue"]:
            StepBatch.from_json(batch, 1)
        bounds, unrecorded = found["clip_bounds"], found.get("unrecorded")
        if len([float(bound) for bound in bounds]) != 2 or not isinstance(unrecorded, (dict, type(None))):
            raise TypeError
        if found.get("best") is not None and not is_description(found["best"]):
            raise TypeError
    except (OSError, UnicodeDecodeError) as error:
        raise IsobitError(f"{path}: cannot be read: {reason_of(error)}") from None
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError):
        raise IsobitError(f"{path}: not the state of a run") from None
    state: dict[str, Any] = found
    return state


def head_of(checkpoint: Path) -> str:
    """The hash of the certificate's newest row when a checkpoint was saved; of one from before there were any, GENESIS.
    Raises IsobitError for what is no hash."""
    path = checkpoint / _TRAINER / _HEAD
    if not exists(path):
        return GENESIS
    try:
        head = parse_json(read_bytes(path, _MOST_HEAD_BYTES).decode("utf-8"))["hash"]
    except (OSError, ValueError, KeyError, TypeError, BadJson) as error:
        raise IsobitError(f"{path}: cannot be read: {reason_of(error)}") from None
    if not isinstance(head, str) or not _HASH.fullmatch(head):
        raise IsobitError(f"{path}: {brief(repr(head))} is no hash of a certificate's row")
    return head


def load_state(checkpoint: Path, parts: Parts) -> dict[str, Any]:
    """Bring the optimizer and the version of the weights back; returns the state. Each rank reads what it keeps."""
    return parts.ranks.run_on_all(lambda: _load_state(checkpoint, parts))


def _load_state(checkpoint: Path, parts: Parts) -> dict[str, Any]:
    trainer, state = checkpoint / _TRAINER, _state(checkpoint)
    try:
        with safe_open(trainer / _OPTIMIZER, framework="pt") as file:
            parts.optimizer.load_state(file_tensors(file))
        parts.calibrator.load_state(load_file(trainer / _KV) if parts.calibrator.active else {})
    except (OSError, SafetensorError) as error:
        raise IsobitError(f"{trainer}: cannot be read: {error}") from None
    if (saved := state.get("masters", MASTERS)) != (wanted := parts.config.optimizer.masters):
        raise IsobitError(
            f"{checkpoint}: its masters are {saved}, and optimizer.masters is {wanted}; a run goes on with its own "
            f"masters. Set it back, or begin a new run from these weights with model.path={checkpoint}"
        )
    parts.learner.state = LearnerState(tuple(state["clip_bounds"]), state["bad_steps_in_a_row"])
    parts.model.transformer.count_from(state["weights_version"])
    return state
