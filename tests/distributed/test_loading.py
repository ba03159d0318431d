"""What ranks read, or draw, of a model's weights: each its rows, and never the whole model."""

import math
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isobit import Model
from isobit.distributed import ALONE, Ranks
from isobit.distributed.shards import Shards
from isobit.model.adapters.targets import NewAdapter
from isobit.model.divided.by_rows import layout_of, model_by_rows
from isobit.model.divided.kept import kept_bytes, largest_part
from isobit.model.hub.checkpoint import Weights
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.model import _drawn
from isobit.model.weights.layout import nbytes
from isobit.model.weights.masters import kept_rows
from isobit.training.plan.live_bytes import LiveBytes, _key, _tensors
from tests.distributed.test_by_rows import ALPHABET, SIZES, model_of
from tests.distributed.threads import run
from tests.models import tiny_model


def drawn(model: Model, ranks: Ranks) -> tuple[dict[str, torch.Tensor], int]:
    """The rows of random weights that a rank keeps, and the most bytes at a time."""
    with LiveBytes() as live:
        shards = Shards.of(parameter_shapes(model.config), ranks)
        rows = dict(kept_rows(_drawn(model.config, 5), shards))
    return rows, live.peak


def test_random_weights_are_drawn_a_tensor_at_a_time() -> None:
    """A rank holds its rows and one tensor more; one that is alone holds them all."""
    model = model_of("dense", "bf16")
    sizes = [4 * math.prod(shape) for shape in parameter_shapes(model.config).values()]
    whole, peak = drawn(model, ALONE)
    assert peak == sum(sizes)
    found = run(
        3, lambda ranks: (*drawn(model, ranks), Shards.of(parameter_shapes(model.config), ranks))
    )
    for rows, most, shards in found:
        own = sum(tensor.nbytes for tensor in rows.values())
        assert 0 < own < sum(sizes) / 2
        assert most <= own + max(sizes)
        for name, kept in rows.items():
            assert torch.equal(kept, whole[name][slice(*shards.own(name))])


@pytest.mark.parametrize(
    ("kind", "precision"), [("dense", "fp8"), ("tied", "bf16"), ("dense", "mxfp8")]
)
def test_bytes_of_a_rank_are_those_that_it_keeps(kind: str, precision: str) -> None:
    """Counted of the whole model as of the one that a rank has; most of it once among all ranks."""
    model = model_of(kind, precision)
    working, layout = model.transformer._working["rollout"], layout_of(model.config, 3)
    counted = [kept_bytes(working, layout, rank) for rank in range(3)]

    def kept(ranks: Ranks) -> int:
        own = model_by_rows(model, ranks).transformer._working["rollout"]
        return sum(nbytes(operand) for _, operand, _ in own.tensors())

    assert counted == run(3, kept)
    whole = sum(nbytes(operand) for _, operand, _ in working.tensors())
    assert kept_bytes(working, layout_of(model.config, 1), 0) == whole < sum(counted) < 1.05 * whole
    assert whole / 8 < largest_part(working) < whole / 2


class Held(TorchDispatchMode):
    """The bytes of tensors that exist, and the most at a time, also where their memory is given
    back and taken again."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made, count = func(*args, **(kwargs or {})), len(self._storages)
        for tensor in _tensors(made):
            storage, key = tensor.untyped_storage(), _key(tensor)
            gone = lambda _, key=key: self._storages.pop(key, None)  # noqa: E731
            self._storages.setdefault(key, weakref.ref(storage, gone))
        if len(self._storages) > count:
            self.peak = max(self.peak, self.now)
        return made

    @property
    def now(self) -> int:
        storages = [held() for held in list(self._storages.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    path = tmp_path_factory.mktemp("models") / "many"
    model = tiny_model("fp8", alphabet=ALPHABET, backend="reference", **SIZES, num_layers=8)
    model.save(path)
    return model, path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "divided", "drawn"), [(2, 2, False), (4, 2, True), (4, 4, False)]
)
def test_a_rank_never_has_more_than_its_rows_and_two_parts(
    saved: tuple[Model, Path], ranks: int, divided: int, drawn: bool
) -> None:
    """Of working weights, whether they are read or drawn, beside its masters. The control: ranks
    that have them whole."""
    model, path = saved
    working, layout = model.transformer._working["learner"], layout_of(model.config, divided)
    largest = max(4 * math.prod(shape) for shape in parameter_shapes(model.config).values())

    def loaded(mine: Ranks, divided: int) -> tuple[int, int]:
        given: dict[str, Any] = {"backend": "reference", "ranks": mine, "divided": divided}
        with Held() as held:
            if drawn:
                own = Model.init(model.config, model.tokenizer, **given)
            else:
                own = Model.load(path, **given)
        kept = kept_bytes(working, layout, mine.rank % layout.size)
        masters = sum(rows.nbytes for rows in own.parameters())
        return held.peak, masters + kept + 2 * largest_part(working) + largest

    for most, bound in run(ranks, lambda mine: loaded(mine, divided)):
        assert most <= bound
    assert all(most > bound for most, bound in run(ranks, lambda mine: loaded(mine, 1)))


def test_a_rank_reads_its_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of masters that are trained those that it keeps; of a model under an adapter those that it
    multiplies by. The control: ranks that have the model whole read it whole."""
    model, path, reading = model_of("dense", "bf16"), tmp_path / "dense", Weights.rows
    model.save(path)
    numbers = Counter[int]()

    def rows(self: Weights, name: str, lo: int = 0, hi: int | None = None) -> torch.Tensor:
        values = reading(self, name, lo, hi)
        numbers[threading.get_ident()] += values.numel()
        return values

    monkeypatch.setattr(Weights, "rows", rows)
    shapes = parameter_shapes(model.config)

    def read(mine: Ranks, adapter: NewAdapter | None, divided: int) -> int:
        numbers[threading.get_ident()] = 0
        Model.load(path, "bf16", "reference", "bitwise", mine, adapter, divided=divided)
        return numbers[threading.get_ident()]

    lora = NewAdapter(4, 8.0, ("all-linear",), 0)
    layout, whole = layout_of(model.config, 2), sum(map(math.prod, shapes.values()))
    assert sum(run(2, lambda mine: read(mine, None, 2))) == whole
    assert run(2, lambda mine: read(mine, lora, 2)) == [
        sum(
            (hi - lo) * math.prod(shape[1:])
            for name, shape in shapes.items()
            for lo, hi in layout.rows(name, rank)
        )
        for rank in range(2)
    ]
    assert run(2, lambda mine: read(mine, lora, 1)) == [whole, whole]
