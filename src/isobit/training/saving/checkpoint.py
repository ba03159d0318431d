"""The contents of a checkpoint, besides a run's counters (`snapshot.py`): written, read, checked.

A checkpoint is a directory of the masters (a PEFT folder for an adapter) with a folder `trainer/`
in it: the optimizer, the state, the samples that wait (`waiting.py`), the scales of a calibrated
cache, the masters of a reference that follows the policy, and the hash of the certificate's newest
row. Left out: when a checkpoint is written (`saver.py`), and that it is whole
(`run/checkpoints.py`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from isobit.data.foreign import BadJson, check_readable, exists, parse_json, read_bytes, reason_of
from isobit.distributed import ALONE, Ranks
from isobit.distributed.files import Part, file_tensors, write_file
from isobit.engine.calibration import Calibrator
from isobit.errors import IsobitError, brief
from isobit.evaluation.best import is_description
from isobit.model import Model
from isobit.model.transformer import Transformer
from isobit.model.weights.checksums import Checksums
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.entropy import EntropyBonus
from isobit.rl.algorithm.objective import ResolvedObjective
from isobit.rl.algorithm.replay import ReplayBuffer
from isobit.rl.algorithm.samples import groups_from_json
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.run import checkpoints
from isobit.run.certificate import GENESIS
from isobit.run.directory import METRICS, NOTHING_WRITTEN
from isobit.training.saving.reference import FollowingReference
from isobit.training.saving.waiting import packed, unpacked

_COUNTS = ("step", "cursor", "weights_version", "bad_steps_in_a_row")
_MOST_HEAD_BYTES = 4096
_HASH = re.compile("[0-9a-f]{64}")
_TRAINER = "trainer"
_OPTIMIZER, _KV, _HEAD = "optimizer.safetensors", "kv_scales.safetensors", "certificate.json"
_REFERENCE, _WAITING = "reference.safetensors", "waiting.safetensors"


@dataclass(frozen=True, eq=False)
class Trained:
    """The state that training changes and a checkpoint holds. `frozen`: the models that the policy
    learns with and that do not learn, a reference and reward models; `reference`: the reference,
    where it follows the policy."""

    model: Model
    optimizer: ShardedOptimizer
    learner: Learner
    calibrator: Calibrator
    replay: ReplayBuffer
    frozen: Sequence[Transformer] = ()
    reference: FollowingReference | None = None

    @property
    def ranks(self) -> Ranks:
        return self.model.ranks

    @property
    def objective(self) -> ResolvedObjective:
        return self.learner.objective

    def memory_metrics(self, frozen: Model | None) -> dict[str, float]:
        """Return the memory allocated for weights, for moments and for a reference, in MiB, by the
        name of the metric. The reference is the one that follows the policy, or else `frozen`: a
        frozen reference with separate storage, or None."""
        sizes = {
            "memory/weights_mib": sum(self.model.memory().values()),
            "memory/optimizer_mib": self.optimizer.nbytes,
        }
        if self.reference is not None:
            sizes["memory/reference_mib"] = self.reference.nbytes
        elif frozen is not None:
            sizes["memory/reference_mib"] = sum(frozen.memory().values())
        return {name: size / 2**20 for name, size in sizes.items()}

    def keep_checksums(self) -> None:
        """Begin to keep checksums, so that a bit that changes in the masters, the optimizer's
        moments or any working weights is noticed from now on."""
        for checksums in (self.model.transformer.checksums, *self._saved_with()):
            checksums.begin()

    def check_saved(self) -> None:
        """Raise Corruption on every rank if, on any rank, memory has changed that a checkpoint
        holds or that a frozen model of the training uses. The policy's working weights are not
        compared here: the learner compares them before it learns (`Learner.check_memory`)."""

        def compare() -> None:
            for checksums in self._saved_with():
                checksums.compare()

        self.ranks.run_on_all(compare)

    def _saved_with(self) -> list[Checksums]:
        return [self.optimizer.checksums, *(transformer.checksums for transformer in self.frozen)]

    def save_model(self, folder: Path) -> None:
        """Write a Hugging Face directory of the masters, or a PEFT folder of an adapter. The type
        is BF16 where all masters are BF16 values, as in a BF16 model that has not learned yet,
        which loses nothing; otherwise float32. Raises Corruption as `check_saved` does."""
        masters = self.model.named_parameters().values()
        narrow = all(bool((rows.bfloat16() == rows).all()) for rows in masters)
        all_narrow = all(self.ranks.all_gather_json(narrow))
        self.model.save(folder, torch.bfloat16 if all_narrow else torch.float32)
        self.check_saved()  # after the write, to notice changes during it too

    def save(
        self,
        directory: Path,
        state: Mapping[str, Any],
        scales: Mapping[str, torch.Tensor],
        head: str,
        keep_last: int,
    ) -> Path:
        """Save a checkpoint of the present state and return its path. `state`: the counters, in
        plain values; `scales`: those of a calibrated cache; `head`: the hash of the certificate's
        newest row. Every rank writes the shards that it keeps, and the first rank writes what all
        ranks have."""

        def write_rest(trainer: Path) -> None:
            trainer.mkdir()
            if self.calibrator.active:
                write_file(
                    trainer / _KV, {name: Part.whole(tensor) for name, tensor in scales.items()}
                )
            plain, waiting = packed(state)
            if waiting:
                write_file(
                    trainer / _WAITING,
                    {name: Part.whole(column) for name, column in waiting.items()},
                )
            text = json.dumps(plain) + "\n"
            (trainer / "state.json").write_text(text, encoding="utf-8")
            text = json.dumps({"step": state["step"], "hash": head}) + "\n"
            (trainer / _HEAD).write_text(text, encoding="utf-8")

        def write(folder: Path) -> None:
            trainer = folder / _TRAINER
            self.ranks.on_first(lambda: write_rest(trainer))
            write_file(trainer / _OPTIMIZER, self.optimizer.parts(), self.ranks)
            if self.reference is not None:
                self.reference.save(trainer / _REFERENCE)
            self.save_model(folder)

        return checkpoints.save(directory, state["step"], write, keep_last, self.ranks)

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Restore the optimizer, the calibrator, the learner, the replay buffer, the reference that
        follows the policy, and the version of the weights, and return the counters. The weights
        themselves must have been read into the model before. Each rank reads the shards that it
        keeps. Raises IsobitError for a file that is not the state of a run."""
        counted = self.ranks.run_on_all(lambda: self._restore(checkpoint))
        if self.reference is not None:
            self.reference.load(checkpoint / _TRAINER / _REFERENCE)
        return counted

    def _restore(self, checkpoint: Path) -> dict[str, Any]:
        trainer, state = checkpoint / _TRAINER, _state(checkpoint)
        try:
            with safe_open(trainer / _OPTIMIZER, framework="pt") as file:
                self.optimizer.load_state(file_tensors(file))
            scales = load_file(trainer / _KV) if self.calibrator.active else {}
            self.calibrator.load_state(scales)
        except (OSError, SafetensorError) as error:
            raise IsobitError(f"{trainer}: cannot be read: {error}") from None
        saved, wanted = state["masters"], self.optimizer.settings.masters
        if saved != wanted:
            raise IsobitError(
                f"{checkpoint}: its masters are {saved}, and optimizer.masters is {wanted}; a run "
                "goes on with its own masters. Set it back, or begin a new run from these weights "
                f"with model.path={checkpoint}"
            )
        begun = EntropyBonus.of(self.learner.objective)  # older checkpoints have no state of it
        bonus = EntropyBonus(**state.get("entropy_bonus", begun.state()))
        self.learner.restore(state["bad_steps_in_a_row"], bonus)
        self.replay.restore(groups_from_json(state["replay"]))
        self.model.transformer.count_from(state["weights_version"])
        return state


def not_finite(model: Model) -> str | None:
    """Return the name of the first master that holds NaN or infinity on any rank, or None."""
    mine = [
        name for name, rows in model.named_parameters().items() if not bool(rows.isfinite().all())
    ]
    broken = {name for names in model.ranks.all_gather_json(mine) for name in names}
    return next((name for name in model.transformer.masters.shards.shapes if name in broken), None)


def problem_of(checkpoint: Path, ranks: Ranks = ALONE) -> str | None:
    """Return why a run cannot go on from a checkpoint that is whole, or None: a weight is not
    finite, or the file of the state is not the state of a run. The ranks divide the weights among
    them, and all return the same."""
    problems = ranks.all_gather_json(ranks.run_on_all(lambda: _broken_weight(checkpoint, ranks)))
    problems += ranks.all_gather_json(ranks.on_first(lambda: _broken_state(checkpoint)))
    return next((problem for problem in problems if problem is not None), None)


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
    path, waiting = (checkpoint / _TRAINER / name for name in ("state.json", _WAITING))
    try:
        check_readable(path)
        tensors = {}  # older checkpoints have no such file
        if exists(waiting):
            check_readable(waiting)
            tensors = load_file(waiting)
        loaded = unpacked(json.loads(path.read_text(encoding="utf-8")), tensors)
        counts = [*(loaded[name] for name in _COUNTS), loaded["rows"], *loaded["offsets"].values()]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise TypeError
        if not set(loaded["offsets"]) <= set(NOTHING_WRITTEN) - {METRICS}:
            raise TypeError  # a run cuts only its own files; metrics.jsonl by its rows
        if not isinstance(loaded["masters"], str):
            raise TypeError
        for groups in (loaded["pending"], loaded["replay"], loaded.get("unfinished", [])):
            groups_from_json(groups)
        for batch in loaded["queue"]:
            StepBatch.from_json(batch, 1)
        if not isinstance(loaded.get("unrecorded"), (dict, type(None))):
            raise TypeError
        bonus = EntropyBonus(**loaded.get("entropy_bonus", {"coefficient": 0.0}))
        if not all(isinstance(number, (float, int, type(None))) for number in vars(bonus).values()):
            raise TypeError
        if loaded.get("best") is not None and not is_description(loaded["best"]):
            raise TypeError
    except (OSError, UnicodeDecodeError) as error:
        raise IsobitError(f"{path}: cannot be read: {reason_of(error)}") from None
    except SafetensorError as error:
        raise IsobitError(f"{waiting}: cannot be read: {error}") from None
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError):
        raise IsobitError(f"{path}: not the state of a run") from None
    state: dict[str, Any] = loaded
    return state


def head_of(checkpoint: Path) -> str:
    """Return the hash of the certificate's newest row when the checkpoint was saved; GENESIS for a
    checkpoint that was saved before the first row, or that has lost the file of the hash. Raises
    IsobitError for a file that cannot be read or that does not hold a hash."""
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
