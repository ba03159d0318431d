"""Which rank keeps which rows: for random shapes and groups, without a tensor."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.distributed import Alone, Shards
from isobit.distributed.layout import HeadRows, Layout, Move, moves
from isobit.errors import IsobitError
from isobit.precision import PRESETS, precision_from

SIZES = st.integers(1, 9)
HEADS = HeadRows(32, 16, 128)


def layout_of(
    size: int,
    heads: HeadRows = HEADS,
    inner: int = 1280,
    hidden: int = 1280,
    vocabulary: int = 1300,
    experts: int = 0,
) -> Layout:
    """A layer of a dense model, or of a mixture with an MLP next to it, and what is around it."""
    rows = (heads.queries + 2 * heads.kv) * heads.dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (vocabulary, hidden),
        "layers.0.input_norm": (hidden,),
        "layers.0.qkv": (rows, hidden),
        "layers.0.qkv_bias": (rows,),
        "layers.0.o": (hidden, heads.queries * heads.dim),
    }
    where = ["layers.0.shared" if experts else "layers.0"]
    where += [f"layers.0.experts.{number}" for number in range(experts)]
    for prefix in where:
        shapes |= {f"{prefix}.gate_up": (2 * inner, hidden), f"{prefix}.down": (hidden, inner)}
    shapes |= {"layers.0.router": (experts, hidden)} if experts else {}
    return Layout(shapes | {"head": (vocabulary, hidden)}, {"layers.0": heads}, size, experts)


@st.composite
def layouts(draw: st.DrawFn, size: int | None = None) -> Layout:
    """Layouts that are accepted: enough heads, blocks and experts, most of them uneven."""
    size = draw(SIZES) if size is None else size
    dim = draw(st.sampled_from([32, 64, 128, 256]))
    kv = max(1, 128 // dim) * draw(st.integers(size, 12))
    heads = HeadRows(kv * draw(st.integers(1, 4)), kv, dim)
    inner, hidden = (128 * draw(st.integers(size, 14)) for _ in range(2))
    vocabulary = 128 * size + draw(st.integers(0, 1500))
    experts = draw(st.sampled_from([0, draw(st.integers(size, 20))]))
    return layout_of(size, heads, inner, hidden, vocabulary, experts)


def kept_rows(layout: Layout, name: str) -> Counter[int]:
    ranks = range(layout.size)
    return Counter(
        row for rank in ranks for lo, hi in layout.rows(name, rank) for row in range(lo, hi)
    )


@settings(max_examples=60)
@given(layouts())
def test_every_row_is_kept_once_and_in_whole_blocks(layout: Layout) -> None:
    """Of what is not divided by every rank."""
    layout.check(precision_from("fp8"))
    for name, (count, *_) in layout.shapes.items():
        copies = 1 if layout.divided(name) else layout.size
        assert kept_rows(layout, name) == Counter(dict.fromkeys(range(count), copies)), name
        for rank in range(layout.size):
            assert all(lo % 128 == 0 for lo, _ in layout.rows(name, rank))
            assert all(hi % 128 == 0 or hi == count for _, hi in layout.rows(name, rank))
    assert {n for n in layout.shapes if not layout.divided(n)} <= {
        "layers.0.input_norm",
        "layers.0.router",
    }


@settings(max_examples=60)
@given(layouts())
def test_columns_are_those_that_a_rank_has_computed(layout: Layout) -> None:
    """A rank's rows of queries are its columns before `o`, and those of a half its columns before
    `down`; blocks of 128 columns are whole."""
    down = "layers.0.shared.down" if layout.experts else "layers.0.down"
    for name, source in (("layers.0.o", "layers.0.qkv"), (down, down.replace("down", "gate_up"))):
        columns = layout.columns(name)
        assert columns is not None
        rows = [layout.rows(source, rank)[0] for rank in range(layout.size)]
        assert columns == tuple(hi - lo for lo, hi in rows)
        assert sum(columns) == layout.shapes[name][1]
        assert all(width % 128 == 0 for width in columns)
    assert layout.columns("layers.0.qkv") is None
    if layout.experts:
        assert layout.columns("layers.0.experts.0.down") is None


def received(found: list[Move]) -> dict[tuple[str, int], Counter[int]]:
    rows: dict[tuple[str, int], Counter[int]] = {}
    for name, (lo, hi), _, target in found:
        rows.setdefault((name, target), Counter()).update(range(lo, hi))
    return rows


@settings(max_examples=30)
@given(st.data(), SIZES)
def test_every_row_is_moved_once_between_any_two_layouts(data: st.DataObject, size: int) -> None:
    """From ranks that have it: of masters, and of another group's rows. The control: a rank less
    leaves rows out."""
    target = data.draw(layouts(size))
    other = Layout(target.shapes, target.heads, data.draw(st.integers(1, 9)), target.experts)

    class Several(Alone):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size  # type: ignore[misc]

    shards = Shards.of(target.shapes, Several(data.draw(SIZES)))
    for source in (shards, other):
        found = list(moves(source, target))
        wanted = {
            (name, rank): Counter(row for lo, hi in rows for row in range(lo, hi))
            for name in target.shapes
            for rank in range(size)
            if (rows := target.rows(name, rank))
        }
        assert received(found) == wanted
        for name, (lo, hi), rank, _ in found:
            kept = [source.rows[name][rank]] if source is shards else other.rows(name, rank)
            assert any(first <= lo and hi <= last for first, last in kept)
        last = max(move.source for move in found)
        assert received([move for move in found if move.source != last]) != wanted


def test_heads_of_a_rank() -> None:
    layout = layout_of(2, HeadRows(6, 3, 128))
    assert [layout.local_heads("layers.0", rank) for rank in (0, 1)] == [(2, 1, 128), (4, 2, 128)]
    assert layout.rows("layers.0.qkv", 1) == ((256, 768), (896, 1152), (1280, 1536))
    assert layout.rows("layers.0.qkv_bias", 1) == layout.rows("layers.0.qkv", 1)
    assert layout_of(3, experts=7).local_experts(1) == range(2, 4)


WRONG = {
    "heads": ({"heads": HeadRows(8, 2, 128)}, r"layers\.0\.qkv has 2 parts, so choose 2 at most"),
    "small heads": ({"heads": HeadRows(4, 4, 64)}, r"qkv has 2 parts"),
    "an MLP": ({"inner": 256}, r"layers\.0\.gate_up has 2 parts"),
    "half a block": ({"inner": 1000}, r"rows of layers\.0\.gate_up in a head or half"),
    "experts": ({"experts": 2}, r"experts\.0\.gate_up has 2 parts"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_divided_is_refused_in_one_line(what: str) -> None:
    """The control: two ranks can, except in the middle of a block."""
    changes, message = WRONG[what]
    with pytest.raises(IsobitError, match=message) as raised:
        layout_of(3, **changes).check(precision_from("fp8"))  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    if what != "half a block":
        layout_of(2, **changes).check(precision_from("fp8"))  # type: ignore[arg-type]


def test_presets_whose_scales_cross_ranks_are_refused() -> None:
    """In one line that names what crosses; the others pass."""
    refused = {}
    for name in PRESETS:
        try:
            layout_of(2).check(precision_from(name))
        except IsobitError as error:
            refused[name] = str(error)
    assert not {"fp8", "fp8-unified", "mxfp8", "bf16", "float32"} & set(refused)
    assert "e2m1 1x16 nvfp4 have a scale of all rows" in refused["nvfp4"]
    assert all("second engine" in refused[name] for name in ("fp8-rollout", "fp8-e2e"))
    row = precision_from("fp8[activation_granularity=row]")
    with pytest.raises(IsobitError, match=r"e4m3 row .* have a scale beyond 128 columns"):
        layout_of(2).check(row)
