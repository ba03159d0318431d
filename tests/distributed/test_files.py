"""Checkpoints that several ranks write and read: the same bytes at every number of ranks, and no
rank reads or holds another's rows."""

import errno
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from isobit.distributed import ALONE, Ranks, files
from isobit.distributed.files import Part, write_file
from isobit.errors import IsobitError, RunFailed
from isobit.evaluation.best import Best
from isobit.model import Model, RewardModel
from isobit.model.fp8_blocks import block_checkpoint
from isobit.model.hub import checkpoint, names
from isobit.model.hub.checkpoint import open_weights, read_weights, write_weights
from isobit.rl import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.run import checkpoints
from isobit.training.saving.checkpoint import Trained, not_finite, problem_of
from tests.distributed.threads import WHOLE_BLOCKS, run
from tests.models import slow_where, tiny_model

SETTINGS = OptimizerSettings(learning_rate=2e-3, total_steps=8)
KINDS = {
    "dense": ("qwen3", SETTINGS),
    "biases": ("qwen2", SETTINGS),
    "mixture": ("qwen3_moe", SETTINGS),
    "8-bit moments": ("qwen3", replace(SETTINGS, state="8bit")),
}
QUICK_KINDS = slow_where(list(KINDS), lambda kind: kind == "8-bit moments")


def of_kind(kind: str) -> tuple[str, OptimizerSettings]:
    """The family and the settings."""
    return KINDS[kind]


def model_of(family: str = "qwen3", ranks: Ranks = ALONE) -> Model:
    return tiny_model("bf16", family, seed=3, ranks=ranks, **WHOLE_BLOCKS)


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


class Run:
    """What a checkpoint is made of, on one rank."""

    def __init__(self, model: Model, settings: OptimizerSettings) -> None:
        self.model, shards = model, model.transformer.masters.shards
        self.optimizer = ShardedOptimizer(model.named_parameters(), settings, shards)

    def learn(self, steps: range) -> "Run":
        """Steps with gradients that are a function of master and step alone; one expert never has
        one."""
        shards = self.optimizer.shards
        for step in steps:
            for name, parameter in self.optimizer.parameters.items():
                if "experts.1.gate_up" not in name:
                    given = torch.Generator().manual_seed(
                        step * 1000 + list(shards.shapes).index(name)
                    )
                    whole = torch.randn(shards.shapes[name], generator=given)
                    parameter.grad = whole[slice(*shards.own(name))].clone()
            self.optimizer.step(1e-3, 1.0)
        return self

    def save(self, directory: Path, step: int = 1) -> Path:
        calibrator = SimpleNamespace(active=True)
        given: Any = (self.model, self.optimizer, None, calibrator, None)
        trained = Trained(*given)
        counts = dict.fromkeys(("cursor", "weights_version", "bad_steps_in_a_row", "rows"), 0)
        lists: dict[str, Any] = {"pending": [], "replay": [], "queue": []}
        state = {"step": step, "masters": "fp32", "offsets": {}, **counts, **lists}
        return trained.save(
            directory,
            state,
            {"scales": torch.arange(6.0).view(2, 3), "tokens": torch.arange(3)},
            "0" * 64,
            keep_last=2,
        )

    @staticmethod
    def load(path: Path, settings: OptimizerSettings, ranks: Ranks) -> "Run":
        found = Run(Model.load(path, "bf16", ranks=ranks), settings)
        with safe_open(path / "trainer" / "optimizer.safetensors", framework="pt") as file:
            found.optimizer.load_state(files.file_tensors(file))
        return found


def test_bytes_are_those_of_safetensors_own_writer(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        f"of {dtype}": torch.arange(15).view(3, 5).to(dtype) for dtype in files._NAMES
    }
    tensors |= {
        "0-d": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        'é "x"\\\n': torch.ones(2),
        "B": torch.ones(1),
    }
    for count in range(len(tensors) + 1):
        some = dict(list(tensors.items())[:count])
        save_file(some, tmp_path / "theirs", metadata={"format": "pt"})
        write_file(tmp_path / "mine", {name: Part.whole(tensor) for name, tensor in some.items()})
        assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_what_is_mapped_from_a_file_outlives_its_replacement(tmp_path: Path) -> None:
    write_file(tmp_path / "a", {"x": Part.whole(torch.ones(5000))})
    mapped = load_file(tmp_path / "a")["x"]
    write_file(tmp_path / "a", {"x": Part.whole(mapped[:10] + 1)})
    assert torch.equal(mapped, torch.ones(5000))
    assert torch.equal(load_file(tmp_path / "a")["x"], torch.full((10,), 2.0))


@pytest.mark.parametrize(
    ("name", "shape", "size"), [("F4", [4], 2), ("F6_E2M3", [4], 3), ("I8", [2], 2)]
)
def test_numbers_that_are_not_read_are_one_line(
    tmp_path: Path, name: str, shape: list[int], size: int
) -> None:
    header = json.dumps({"a": {"dtype": name, "shape": shape, "data_offsets": [0, size]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(size)
    )
    with pytest.raises(IsobitError, match=r"a has dtype (F4|F6_E2M3|torch.int8); expected float32"):
        read_weights(tmp_path)


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 300_000])
def test_a_model_has_the_bytes_of_safetensors_own_writer(
    tmp_path: Path, family: str, dtype: torch.dtype, shard_bytes: int
) -> None:
    model = model_of(family)
    parts = names.split(model.named_parameters(), model.config)
    made = {name: part.mine() if callable(part.mine) else part.mine for name, part in parts.items()}
    tensors = {
        name: tensor.detach().to(dtype) for name, tensor in made.items() if tensor is not None
    }
    for size in (1, 2, 3, 4):
        folder = tmp_path / str(size)
        run(
            size,
            lambda ranks: model_of(family, ranks).save(
                tmp_path / str(ranks.size), dtype, shard_bytes
            ),
        )
        found = sorted(folder.glob("*.safetensors"))
        assert (len(found) > 2) == (shard_bytes < 1 << 30)
        for path in found:
            there = list(load_file(path))
            save_file(
                {name: tensors[name] for name in there},
                tmp_path / "theirs",
                metadata={"format": "pt"},
            )
            assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
        assert hashes(folder) == hashes(tmp_path / "1")


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_a_checkpoint_has_the_same_bytes_at_every_number_of_ranks(
    tmp_path: Path, kind: str
) -> None:
    family, settings = of_kind(kind)

    def work(ranks: Ranks) -> Path:
        return (
            Run(model_of(family, ranks), settings).learn(range(2)).save(tmp_path / str(ranks.size))
        )

    wanted = hashes(work(ALONE))
    assert {
        "manifest.json",
        "model.safetensors",
        "trainer/kv_scales.safetensors",
        "config.json",
    } <= set(wanted)
    save_file(
        Run(model_of(family), settings).learn(range(2)).optimizer.state(),
        tmp_path / "theirs",
        metadata={"format": "pt"},
    )
    assert (
        hashlib.sha256((tmp_path / "theirs").read_bytes()).hexdigest()
        == wanted["trainer/optimizer.safetensors"]
    )
    for size in (1, 2, 3, 4):
        path = run(size, work)[0]
        assert hashes(path) == wanted, size
        assert checkpoints.damage(path) is None


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_a_checkpoint_is_taken_up_by_any_number_of_ranks(tmp_path: Path, kind: str) -> None:
    """Saved by 4, loaded and saved by 3, 1 and 2; and what they learn then is what one rank would
    have learned."""
    family, settings = of_kind(kind)

    def again(ranks: Ranks) -> Path:
        return Run.load(path, settings, ranks).save(tmp_path / str(ranks.size))

    def further(ranks: Ranks) -> Path:
        return (
            Run.load(path, settings, ranks)
            .learn(range(2, 4))
            .save(tmp_path / f"further-{ranks.size}")
        )

    straight = hashes(Run(model_of(family), settings).learn(range(4)).save(tmp_path / "straight"))
    path = run(
        4, lambda ranks: Run(model_of(family, ranks), settings).learn(range(2)).save(tmp_path / "4")
    )[0]
    wanted = hashes(path)
    assert wanted != straight
    for size in (3, 1, 2):
        path = run(size, again)[0]
        assert hashes(path) == wanted, size
        assert hashes(run(size, further)[0]) == straight, size


def _numel(part: Part) -> int:
    """How many elements of a tensor a rank writes."""
    assert not callable(part.mine)
    return 0 if part.mine is None else part.mine.numel()


def test_control_rows_in_the_order_of_ranks_are_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_order_of_ranks(path: Path, parts: dict[str, Part], ranks: Ranks = ALONE) -> None:
        counts = ranks.all_gather_json({name: _numel(part) for name, part in parts.items()})
        starts = {name: sum(given[name] for given in counts[: ranks.rank]) for name in parts}
        write_file(
            path, {name: replace(part, start=starts[name]) for name, part in parts.items()}, ranks
        )

    run(3, lambda ranks: model_of(ranks=ranks).save(tmp_path / "right"))
    monkeypatch.setattr(checkpoint, "write_file", in_order_of_ranks)
    run(3, lambda ranks: model_of(ranks=ranks).save(tmp_path / "wrong"))
    right, wrong = (tmp_path / which / "model.safetensors" for which in ("right", "wrong"))
    assert right.stat().st_size == wrong.stat().st_size
    assert right.read_bytes() != wrong.read_bytes()


class _Fault:
    """`os.pwrite` as a rank has it: what happens instead, in the threads that have come."""

    def __init__(self, instead: Callable[..., int]) -> None:
        self.instead, self.threads = instead, set[int]()

    def strike(self, ranks: Ranks, rank: int) -> None:
        if ranks.rank == rank:
            self.threads.add(threading.get_ident())

    def __call__(self, file: int, data: Any, offset: int) -> int:
        if threading.get_ident() in self.threads:
            return self.instead(file, data, offset)
        return os.pwritev(file, [data], offset)


class _Died(BaseException):
    pass


def _raising(error: BaseException) -> Callable[..., int]:
    def instead(*_: object) -> int:
        raise error

    return instead


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A save by three ranks, after an earlier one, in which one of them cannot write: what each
    rank raised."""

    def struck(rank: int, instead: Callable[..., int]) -> list[BaseException | None]:
        fault = _Fault(instead)

        def work(ranks: Ranks) -> BaseException | None:
            one = Run(model_of(ranks=ranks), SETTINGS).learn(range(1))
            one.save(tmp_path, 1)
            monkeypatch.setattr(files.os, "pwrite", fault)
            fault.strike(ranks, rank)
            ranks.all_gather_json(None)
            try:
                one.learn(range(1, 2)).save(tmp_path, 2)
            except Exception as error:
                return error
            return None

        try:
            return run(3, work)
        finally:
            monkeypatch.undo()

    yield struck
    assert checkpoints.damage(tmp_path / "step-000001") is None
    path, _ = checkpoints.newest(tmp_path)
    assert path.name == "step-000001"
    checkpoints.go_on_from(path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_cannot_write_is_one_error_on_all(
    tmp_path: Path, strike: Any, rank: int, number: int
) -> None:
    errors = strike(rank, _raising(OSError(number, os.strerror(number))))
    assert {type(error) for error in errors} == {RunFailed}
    assert {str(error) for error in errors} == {
        f"cannot save checkpoint {tmp_path / 'step-000002'}: {os.strerror(number)}; earlier "
        "checkpoints are intact"
    }
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_rank_that_writes_nothing_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(2, lambda ranks: Run(model_of(ranks=ranks), SETTINGS).save(tmp_path, 1))
    fill = files._fill

    def nothing(*given: Any, flush: bool) -> int:
        return 0 if flush else fill(*given, flush=flush)  # on all but the first

    monkeypatch.setattr(files, "_fill", nothing)

    def work(ranks: Ranks) -> None:
        with pytest.raises(RunFailed, match=r"model.safetensors: the ranks wrote \d+ of \d+ bytes"):
            Run(model_of(ranks=ranks), SETTINGS).save(tmp_path, 2)

    run(2, work)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_leaves_no_checkpoint(tmp_path: Path, strike: Any, rank: int) -> None:
    """The first rank, where it is another that died, still clears away what was begun."""
    with pytest.raises(_Died):
        strike(rank, _raising(_Died()))
    begun = [".writing-step-000002"] if rank == 0 else []
    assert sorted(p.name for p in tmp_path.iterdir()) == [*begun, "step-000001"]


def test_the_best_model_is_kept_by_all_ranks(tmp_path: Path) -> None:
    """A better one replaces it, a worse one does not, and a run that goes on from before has the
    one of its time."""

    def work(ranks: Ranks) -> tuple[Any, Any]:
        folder = tmp_path / str(ranks.size)
        ranks.on_first(folder.mkdir)
        one = Run(model_of(ranks=ranks), SETTINGS)
        best = Best(folder, "m", one.model.save, ranks)
        best.consider(1, {"m": 0.5})
        best.settle()
        saved = best.to_json()
        one.learn(range(1))
        best.consider(2, {"m": 0.25})
        first = hashes(folder / "best")
        best.consider(3, {"m": 0.75})
        ranks.all_gather_json(None)
        better = hashes(folder / "best")
        ranks.all_gather_json(None)
        again = Best(folder, "m", one.model.save, ranks)
        again.restore(saved)
        assert hashes(folder / "best") == first != better
        assert (again.step, again.values) == (1, [0.5])
        return first, better

    wanted = work(ALONE)
    for size in (2, 3):
        assert run(size, work) == [wanted] * size


def _poisoned(path: Path, parts: dict[str, Part]) -> None:
    """Make every number of a file NaN (255 in codes) that is not this rank's. Counts of steps
    stay."""
    whole = load_file(path)
    for name, part in parts.items():
        tensor = whole[name].view(-1)
        kept = tensor[part.start : part.start + _numel(part)].clone()
        if part.shape:
            tensor.fill_(255 if part.dtype == torch.uint8 else math.nan)
        tensor[part.start : part.start + len(kept)] = kept
    save_file(whole, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_reads_the_rows_of_another(tmp_path: Path, kind: str) -> None:
    """Each loads a copy in which all else is not a number, which loading refuses: the control."""
    family, settings = of_kind(kind)
    path = Run(model_of(family), settings).learn(range(2)).save(tmp_path)
    wanted = hashes(path)

    def work(ranks: Ranks) -> Path:
        mine, own = tmp_path / f"{ranks.size}-{ranks.rank}", Run.load(path, settings, ranks)
        shutil.copytree(path, mine)
        parameters = own.model.named_parameters()
        _poisoned(
            mine / "model.safetensors", names.split(parameters, own.model.config, ranks=ranks)
        )
        _poisoned(mine / "trainer" / "optimizer.safetensors", own.optimizer.parts())
        if ranks.size > 1:
            with pytest.raises(IsobitError, match="holds NaN or infinity"):
                Model.load(mine, "bf16")
        return Run.load(mine, settings, ranks).save(tmp_path / f"again-{ranks.size}")

    for size in (1, 2, 3):
        assert hashes(run(size, work)[0]) == wanted


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16, "fp8"])
def test_other_forms_are_read_by_rows(tmp_path: Path, form: Any) -> None:
    model = tiny_model("fp8", seed=3, **WHOLE_BLOCKS)
    if form == "fp8":
        blocks = block_checkpoint(model)
        model.write(tmp_path, blocks.tensors, {"quantization_config": blocks.quantization_config})
    else:
        model.save(tmp_path, form)
    whole = Model.load(tmp_path, "bf16").named_parameters()
    assert any(
        not torch.equal(whole[name], master) for name, master in model.named_parameters().items()
    )

    def work(ranks: Ranks) -> None:
        loaded = Model.load(tmp_path, "bf16", ranks=ranks)
        for name, rows in loaded.named_parameters().items():
            assert torch.equal(
                rows, whole[name][slice(*loaded.transformer.masters.shards.own(name))]
            )

    for size in (2, 3):
        run(size, work)


def test_rows_that_begin_inside_a_block_have_its_scale(tmp_path: Path) -> None:
    codes, scale = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.rand(3, 2)
    write_weights(tmp_path, {"a": codes, "a_scale_inv": scale})
    wanted = (
        codes.float() * scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    )
    with open_weights(tmp_path) as weights:
        for lo, hi in (
            (0, 300),
            (0, 128),
            (100, 200),
            (127, 129),
            (128, 256),
            (255, 300),
            (299, 300),
            (7, 7),
        ):
            assert torch.equal(weights.rows("a", lo, hi), wanted[lo:hi])


def test_a_reward_model_is_read_by_all_ranks_and_scores_the_same(tmp_path: Path) -> None:
    tiny_model("bf16", seed=3, **WHOLE_BLOCKS).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"score.weight": torch.linspace(-1, 1, 256)[None]}, tmp_path / "model.safetensors"
    )
    sequences = [[3, 4, 5, 6], [7, 8]]
    wanted = RewardModel.load(tmp_path, "fp8").score(sequences)
    assert wanted[0] != wanted[1]
    for size in (2, 3):
        found = run(
            size, lambda ranks: RewardModel.load(tmp_path, "fp8", ranks=ranks).score(sequences)
        )
        assert found == [wanted] * size


DEFECTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "NaN": (
        lambda t: t["model.layers.1.mlp.down_proj.weight"][255].fill_(math.nan),
        "down_proj.weight holds NaN",
    ),
    "missing": (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
    "head": (
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        "differs from the embedding",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_in_one_ranks_rows_is_one_line_on_all(tmp_path: Path, defect: str) -> None:
    harm, message = DEFECTS[defect]
    model_of().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    harm(tensors)
    save_file(tensors, tmp_path / "model.safetensors")

    def work(ranks: Ranks) -> str:
        with pytest.raises(IsobitError, match=message) as caught:
            Model.load(tmp_path, "bf16", ranks=ranks)
        return str(caught.value)

    assert len({line for size in (1, 2, 3) for line in run(size, work)}) == 1


def test_what_is_not_finite_on_one_rank_is_known_to_all(tmp_path: Path) -> None:
    path = Run(model_of(), SETTINGS).learn(range(1)).save(tmp_path)

    def work(ranks: Ranks) -> tuple[str | None, str | None]:
        model = model_of(ranks=ranks)
        assert not_finite(model) is None
        rows = model.named_parameters()
        shards = model.transformer.masters.shards
        for name, row in (("final_norm", 0), ("layers.1.down", 255)):
            lo, hi = shards.own(name)
            if lo <= row < hi:
                rows[name].data[row - lo] = math.inf
        return not_finite(model), problem_of(path, ranks)

    for size in (1, 2, 3):
        assert run(size, work) == [("layers.1.down", None)] * size
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, path / "model.safetensors")
    for size in (1, 2, 3):
        found = run(size, lambda ranks: problem_of(path, ranks))
        assert found == ["model.norm.weight in model.safetensors is not finite"] * size


def test_a_flipped_bit_is_seen_whoever_looks(tmp_path: Path) -> None:
    path = Run(model_of(), SETTINGS).learn(range(1)).save(tmp_path)
    for size in (1, 2, 3):
        assert run(size, lambda ranks: checkpoints.damage(path, ranks)) == [None] * size
    data = bytearray((path / "trainer" / "optimizer.safetensors").read_bytes())
    data[-3] ^= 4
    (path / "trainer" / "optimizer.safetensors").write_bytes(data)
    (path / "config.json").unlink()
    for size in (1, 2, 3):
        assert (
            run(size, lambda ranks: checkpoints.damage(path, ranks))
            == ["config.json is missing"] * size
        )
    for size in (1, 2, 3):
        with pytest.raises(IsobitError, match=r"all 1 are damaged: .*config.json is missing"):
            run(size, lambda ranks: checkpoints.newest(tmp_path, None, ranks))
