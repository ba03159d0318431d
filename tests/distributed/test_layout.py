"""Which rank keeps which rows: for random shapes and groups, without a tensor."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.distributed import Alone, Shards
from isobit.distributed.layout import HeadRows, Layout, Move, moves
from isobit.errors import IsobitError
from isobit.precision import PRESETS, precision_from

SIZES = st.integers(1, 9)
HEADS = HeadRows.of(32, 16, 128)
LATENTS = 192
"""Rows that give what all heads share, behind those of whole queries."""


def layout_of(
    size: int,
    heads: HeadRows = HEADS,
    inner: int = 1280,
    hidden: int = 1280,
    vocabulary: int = 1300,
    experts: int = 0,
    experts_inner: int = 1280,
) -> Layout:
    """A layer of a dense model, or of a mixture with an MLP next to it, and what is around it."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, hidden)}
    shapes["layers.0.input_norm"] = (hidden,)
    for role, sizes in heads.rows.items():
        rows = heads.count * sum(sizes) + (LATENTS if role == "qkv_a" else 0)
        shapes[f"layers.0.{role}"] = (rows, hidden)
        if role == "qkv":
            shapes["layers.0.qkv_bias"] = (rows,)
    shapes["layers.0.o"] = (hidden, heads.count * heads.columns)
    where = {"layers.0.shared" if experts else "layers.0": inner}
    where |= {f"layers.0.experts.{number}": experts_inner for number in range(experts)}
    for prefix, wide in where.items():
        shapes |= {f"{prefix}.gate_up": (2 * wide, hidden), f"{prefix}.down": (hidden, wide)}
        shapes[f"{prefix}.down_bias"] = (hidden,)
    shapes |= {"layers.0.router": (experts, hidden)} if experts else {}
    return Layout(shapes | {"head": (vocabulary, hidden)}, {"layers.0": heads}, size, experts)


@st.composite
def attentions(draw: st.DrawFn, size: int) -> HeadRows:
    """Heads of each kind, of enough parts: of keys and values, gated, of latents with queries of
    their own latent or whole, and of linear attention."""
    dim, shared = draw(st.sampled_from([32, 64, 96, 128, 256])), draw(st.integers(1, 4))
    plain = HeadRows.of(shared, 1, dim)
    value = draw(st.sampled_from([64, 128]))
    linear = {"qkv": (dim, dim, shared * value, shared * value), "gates": (shared, shared)}
    linear |= {"conv": (dim, dim, shared * value), "step_bias": (shared,)}
    kinds = [
        plain,
        replace(plain, rows={"qkv": (2 * shared * dim, dim, dim)}),
        HeadRows(1, {"q_b": (dim,), "kv_b": (64 + value,)}, value),
        HeadRows(1, {"qkv_a": (dim,), "kv_b": (64 + value,)}, value),
        HeadRows(1, linear, shared * value),
    ]
    heads = draw(st.sampled_from(kinds))
    return replace(heads, count=heads.together * draw(st.integers(size, 12)))


@st.composite
def layouts(draw: st.DrawFn, size: int | None = None) -> Layout:
    """Layouts that are accepted: enough heads, blocks and experts, most of them uneven."""
    size = draw(SIZES) if size is None else size
    inner, hidden = (128 * draw(st.integers(size, 14)) for _ in range(2))
    vocabulary = 128 * size + draw(st.integers(0, 1500))
    experts = draw(st.sampled_from([0, draw(st.integers(size, 20))]))
    wide = draw(st.one_of(st.integers(1, 14).map(lambda blocks: 128 * blocks), st.just(96)))
    return layout_of(size, draw(attentions(size)), inner, hidden, vocabulary, experts, wide)


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
    whole = "input_norm", "router", "sinks", "gates", "conv", "step_bias", "qkv_a"
    undivided = {name for name in layout.shapes if not layout.divided(name)}
    assert undivided <= {f"layers.0.{name}" for name in whole}


@settings(max_examples=60)
@given(layouts())
def test_each_head_is_computed_once(layout: Layout) -> None:
    """Of what is whole on every rank too, where rows belong to heads; what they share by every rank.
    A rank's rows are those of its heads in each part."""
    heads = layout.heads["layers.0"]
    ranks = range(layout.size)
    local = [layout.local_heads("layers.0", rank) for rank in ranks]
    assert [head for some in local for head in some] == list(range(heads.count))
    for role, sizes in heads.rows.items():
        used = [layout.used(f"layers.0.{role}", rank) for rank in ranks]
        counted = Counter(row for each in used for lo, hi in each for row in range(lo, hi))
        own = heads.count * sum(sizes)
        shared = LATENTS if role == "qkv_a" else 0
        assert counted == Counter(
            {row: layout.size if row >= own else 1 for row in range(own + shared)}
        )
        for each, some in zip(used, local):
            assert sum(hi - lo for lo, hi in each) == len(some) * sum(sizes) + shared


@settings(max_examples=60)
@given(layouts())
def test_experts_are_whole_or_by_rows(layout: Layout) -> None:
    """One of the two for all of them: by rows where each has a block for every rank."""
    ranks = range(layout.size)
    kept = [
        {n for n in range(layout.experts) if layout.rows(f"layers.0.experts.{n}.down", rank)}
        for rank in ranks
    ]
    assert kept == [set(layout.local_experts(rank)) for rank in ranks]
    if not layout.experts:
        return
    inner = layout.shapes["layers.0.experts.0.down"][1]
    by_rows = inner % 128 == 0 and inner // 128 >= layout.size
    assert layout.whole_experts == (not by_rows)
    each = set(range(layout.experts))
    assert all(some == each for some in kept) if by_rows else sum(map(len, kept)) == len(each)
    assert (layout.result("layers.0.experts.0.down") is None) == layout.whole_experts


@settings(max_examples=60)
@given(layouts())
def test_columns_are_those_that_a_rank_has_computed(layout: Layout) -> None:
    """A rank's rows of queries are its columns before `o`, and those of a half its columns before
    `down`; blocks of 128 columns are whole."""
    mlps = ["layers.0.shared" if layout.experts else "layers.0"]
    mlps += ["layers.0.experts.0"] if layout.experts and not layout.whole_experts else []
    for prefix in mlps:
        columns = layout.columns(f"{prefix}.down")
        assert columns is not None
        rows = [layout.rows(f"{prefix}.gate_up", rank)[0] for rank in range(layout.size)]
        assert columns == tuple(hi - lo for lo, hi in rows)
        assert sum(columns) == layout.shapes[f"{prefix}.down"][1]
        assert all(width % 128 == 0 for width in columns)
    columns, heads = layout.columns("layers.0.o"), layout.heads["layers.0"]
    assert columns is not None
    local = [len(layout.local_heads("layers.0", rank)) for rank in range(layout.size)]
    assert columns == tuple(heads.columns * count for count in local)
    assert all(width % 128 == 0 for width in columns)
    assert all(layout.columns(f"layers.0.{role}") is None for role in heads.rows)
    if layout.experts and layout.whole_experts:
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
    layout = layout_of(2, HeadRows.of(6, 3, 128))
    assert [layout.local_heads("layers.0", rank) for rank in (0, 1)] == [range(1), range(1, 3)]
    assert layout.rows("layers.0.qkv", 1) == ((256, 768), (896, 1152), (1280, 1536))
    assert layout.rows("layers.0.qkv_bias", 1) == layout.rows("layers.0.qkv", 1)
    assert layout.used("layers.0.sinks", 1) == ((2, 6),)
    assert layout.rows("layers.0.sinks", 1) == ((0, 6),)
    whole = layout_of(3, experts=7, experts_inner=256)
    assert whole.local_experts(1) == range(2, 4)
    assert whole.rows("layers.0.experts.2.down", 1) == ((0, 1280),)
    assert whole.rows("layers.0.experts.2.down", 0) == ()
    assert layout_of(3, experts=7).rows("layers.0.experts.2.down", 1) == ((384, 768),)


WRONG = {
    "heads": (
        {"heads": HeadRows.of(8, 2, 128)},
        r"layers\.0\.qkv has 2 parts, so choose 2 at most",
    ),
    "small heads": ({"heads": HeadRows.of(4, 4, 64)}, r"qkv has 2 parts"),
    "an MLP": ({"inner": 256}, r"layers\.0\.gate_up has 2 parts"),
    "half a block": ({"inner": 1000}, r"rows of layers\.0\.gate_up in a head or half"),
    "experts": ({"experts": 2, "experts_inner": 256}, r"experts\.0\.gate_up has 2 parts"),
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
