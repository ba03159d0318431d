"""Hugging Face tensor names to fused masters, and back.

`q_proj`, `k_proj`, `v_proj` are the rows of `qkv`, in this order; `gate_proj`, `up_proj` (Mixtral:
w1, w3) those of `gate_up`: the `modules` of a family's table. Every expert has its own tensors,
also where files hold all of a layer together (`packed_experts.py`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from isobit.distributed import ALONE, Ranks, Shards
from isobit.distributed.files import Part
from isobit.distributed.layout import Layout
from isobit.distributed.shards import Rows
from isobit.distributed.weights import Stored, share_rows
from isobit.errors import IsobitError, brief
from isobit.model.families import FAMILIES
from isobit.model.families.family import AFTER_THE_LAST, Packing
from isobit.model.hub.checkpoint import Shapes
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.packed_experts import Place, Read, apart, in_files, joined, place
from isobit.model.hub.shapes import parameter_shapes

_OUTSIDE = {
    "embed": "model.embed_tokens.weight",
    "embed_layers": "model.embed_tokens_per_layer.weight",
    "project_layers": "model.per_layer_model_projection.weight",
    "project_layers_norm": "model.per_layer_projection_norm.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_OF_TOKENS = ("embed", "embed_layers", "head")
"""Masters that have a row for each token id."""
_BARE = (
    *("sinks", "decay", "step_bias", "skip", "balance", "layer_scalar"),
    *("router_norm", "expert_scale"),
)
"""Tensors whose names end with the module's."""
_KEYS = tuple(
    f"self_attn.{letter}_{submodule}." for letter in "kv" for submodule in ("proj", "norm")
)
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def fuse(
    read: Read,
    config: ModelConfig,
    ranks: Ranks = ALONE,
    dtype: torch.dtype = torch.float32,
    shapes: Shapes = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return the rows that a rank keeps of the masters, by name, from those of Hugging Face tensors
    that `check_shapes` takes, rounded to `dtype`. No other rows are read. `shapes`: the tensors',
    which say whether a layer's experts are together."""
    shards, read = Shards.of(parameter_shapes(config), ranks), _reader(read, config, shapes)

    def own(master: str, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        pieces = [
            read(piece.name, piece.lo, piece.hi) for piece in _pieces(tensors, shards.own(master))
        ]
        return torch.cat(pieces).reshape(shards.own_shape(master)).to(dtype)

    return {
        master: own(master, tensors) for master, tensors in parts(config) if shards.owned(master)
    }


def split(
    masters: Mapping[str, Tensor],
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks = ALONE,
    like: Shapes = MappingProxyType({}),
) -> dict[str, Part]:
    """Return Hugging Face tensors, of which each rank writes the rows that it keeps of the masters;
    the inverse of `fuse`. `like`: tensors whose form experts take, if they are together there."""
    shards = Shards.of(parameter_shapes(config), ranks)
    pieces: dict[str, Part] = {}
    packing = packing_of(config, like)
    for master, tensors in parts(config):
        if packing is not None and ".experts." in master:
            continue
        pieces |= {name: Part(dtype, shape) for name, shape in tensors}
        for piece in _pieces(tensors, shards.own(master)):
            mine = masters[master][piece.at : piece.at + piece.hi - piece.lo].reshape(
                -1, *piece.shape[1:]
            )
            pieces[piece.name] = Part(dtype, piece.shape, mine, piece.lo * shards.width(master))
    return pieces | (_joined(masters, config, dtype, shards, packing) if packing else {})


def beyond(read: Read, config: ModelConfig, vocabulary: int) -> dict[str, Tensor]:
    """Return the rows of Hugging Face tensors that stand for token ids from `vocabulary` on."""
    return {
        name: read(name, vocabulary, shape[0]).clone()  # the file is closed later
        for master, tensors in parts(config)
        if master in _OF_TOKENS
        for name, shape in tensors
    }


def with_rows(pieces: Mapping[str, Part], rows: Mapping[str, Tensor]) -> dict[str, Part]:
    """Return the tensors of `split` with these `rows` behind them; who writes the last row of a
    tensor writes them too."""
    longer = dict(pieces)
    for name, more in rows.items():
        part = pieces[name]
        shape, mine = (part.shape[0] + len(more), *part.shape[1:]), part.mine
        if isinstance(mine, Tensor) and part.start + mine.numel() == math.prod(part.shape):
            mine = partial(_behind, mine, more, part.dtype)
        longer[name] = Part(part.dtype, shape, mine, part.start)
    return longer


def _behind(first: Tensor, more: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([each.detach().to("cpu", dtype) for each in (first, more)])


def _joined(
    masters: Mapping[str, Tensor],
    config: ModelConfig,
    dtype: torch.dtype,
    shards: Shards,
    packing: Packing,
) -> dict[str, Part]:
    """Return the tensors that hold experts together. On one rank, each is made when it is written;
    of several ranks the first makes and writes them, from the rows that all have sent, and holds
    them until then."""
    groups: dict[str, list[tuple[Place, str, int, int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for master, tensors in parts(config):
        first = 0
        for name, shape in tensors:
            if (at := place(name)) is not None:
                groups.setdefault(at.name, []).append((at, master, first, first + shape[0]))
                shapes[name] = shape
            first += shape[0]
    whole, views = in_files(shapes, packing), dict[str, Part]()
    for name, members in groups.items():
        values = whole_masters(
            masters, dict.fromkeys(member[1] for member in members), dtype, shards
        )
        pieces = [(at, values[master][lo:hi]) for at, master, lo, hi in members]
        make = partial(joined, pieces, whole[name], dtype, packing)
        mine = make if shards.ranks.size == 1 else make() if shards.ranks.first else None
        views[name] = Part(dtype, whole[name], mine)
    return views


def whole_masters(
    masters: Mapping[str, Tensor], wanted: Iterable[str], dtype: torch.dtype, shards: Shards
) -> Mapping[str, Tensor]:
    """Return these masters with the rows of other ranks, if there are any, as `dtype`."""
    if shards.ranks.size == 1:
        return masters
    device = next(iter(masters.values())).device
    whole = {name: torch.empty(shards.shapes[name], dtype=dtype, device=device) for name in wanted}
    for name, tensor in whole.items():
        if shards.owned(name):
            tensor[slice(*shards.own(name))] = masters[name].detach().to(dtype)
    share_rows([Stored(name, tensor) for name, tensor in whole.items()], shards)
    return whole


def packing_of(config: ModelConfig, shapes: Shapes = MappingProxyType({})) -> Packing | None:
    """Return how files hold a layer's experts together, or None where they do not: as the family's
    files are written, or as the names and shapes of these tensors say."""
    mixtures = FAMILIES[config.family].mixtures
    if config.experts is None or mixtures is None:
        return None
    if mixtures.together is not None:
        return mixtures.together
    together = [shape for name, shape in shapes.items() if name.endswith(".experts.gate_up_proj")]
    if not together:
        return None
    hidden, inner = config.hidden_size, config.experts.intermediate_size
    if hidden == 2 * inner:  # a square, of which the other matrix tells
        down = (shape for name, shape in shapes.items() if name.endswith(".experts.down_proj"))
        return "halves" if next(down, ())[1:] == (inner, hidden) else "rows"
    return "halves" if together[0][1:] == (hidden, 2 * inner) else "rows"


def _reader(read: Read, config: ModelConfig, shapes: Shapes) -> Read:
    packing = packing_of(config, shapes)
    return read if packing is None else apart(read, packing)


class Fused(Mapping[str, Tensor]):
    """Whole masters, float32 on a device, each read when it is asked for, and not kept. With a
    `layout` of several ranks only the rows are read that a `rank` keeps, and others are 0."""

    def __init__(
        self,
        read: Read,
        config: ModelConfig,
        device: torch.device,
        shapes: Shapes = MappingProxyType({}),
        layout: Layout | None = None,
        rank: int = 0,
    ) -> None:
        self._read, self._device = _reader(read, config, shapes), device
        self._parts = dict(parts(config))
        self._shapes = parameter_shapes(config)
        self._layout, self._rank = layout, rank

    def __getitem__(self, name: str) -> Tensor:
        tensors, shape = self._parts[name], self._shapes[name]
        if self._layout is None:
            pieces = [self._read(tensor, 0, rows) for tensor, (rows, *_) in tensors]
            whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            return whole.reshape(shape).to(self._device)
        master = torch.zeros(shape, device=self._device)
        for rows in self._layout.rows(name, self._rank):
            for piece in _pieces(tensors, rows):
                values = self._read(piece.name, piece.lo, piece.hi)
                into = master[rows[0] + piece.at :][: len(values)]
                into.copy_(values.view(into.shape))
        return master

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class _Piece(NamedTuple):
    """Rows `lo` to `hi` of a Hugging Face tensor, which are row `at` and those after it of the rows
    that a rank keeps."""

    name: str
    shape: tuple[int, ...]
    lo: int
    hi: int
    at: int


def _pieces(tensors: Sequence[tuple[str, tuple[int, ...]]], rows: Rows) -> Iterator[_Piece]:
    """Yield the pieces of Hugging Face tensors that these rows of a master are made of."""
    first = 0
    for name, shape in tensors:
        lo, hi = max(rows[0] - first, 0), min(rows[1] - first, shape[0])
        if lo < hi:
            yield _Piece(name, shape, lo, hi, first + lo - rows[0])
        first += shape[0]


def check_shapes(shapes: Shapes, config: ModelConfig, where: str) -> None:
    """Raise IsobitError unless these tensors are those of the architecture. The time that this
    takes is bounded by the number of tensors, however large the sizes in config.json."""
    count = 0 if config.experts is None else config.experts.count
    packing = packing_of(config, shapes)
    most = len(shapes) if packing is None else sum(map(math.prod, shapes.values()))
    if config.num_layers > len(shapes) or config.num_mixtures * count > most:
        experts = f" of {count:,} experts" if count else ""
        raise IsobitError(
            f"{where}: config.json says {config.num_layers:,} layers{experts}, but the weights are "
            f"{len(shapes):,} tensors, fewer than such layers have"
        )
    expected = {name: shape for _, names in parts(config) for name, shape in names}
    expected = expected if packing is None else in_files(expected, packing)
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    present = {name for name in shapes if not _ignored(name, config)} - tied
    for problem, names in (
        ("is missing", expected.keys() - present),
        ("is not part of this architecture", present - expected.keys()),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise IsobitError(
                f"{where}: tensor {brief(min(names))} {problem}{more}; config.json says "
                f"{config.family}"
            )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise IsobitError(
                f"{where}: tensor {name} has shape {shapes[name]}, but config.json asks for {shape}"
            )


def _ignored(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is not read: tables of rotary embedding, layers that predict further
    tokens, where a family has them, and keys and values of a layer that reads another's."""
    layer, _, inside = name.removeprefix("model.layers.").partition(".")
    number = int(layer) if layer.isdecimal() and len(layer) < 6 else -1
    if config.num_stores <= number < config.num_layers:
        return inside.startswith(_KEYS)
    more = FAMILIES[config.family].predicts_more
    if more == AFTER_THE_LAST:
        return number >= config.num_layers
    if more is not None and name.startswith(more):
        return True
    return name.endswith(_IGNORED_SUFFIXES)


def check_tied(
    read: Read, shapes: Shapes, config: ModelConfig, where: str, ranks: Ranks = ALONE
) -> None:
    """Refuse a head that differs from the embedding where config.json ties them: `transformers`
    would take the head. Each rank compares the rows that it keeps."""
    embed, head = outside("embed", config), outside("head", config)
    if not config.tie_embeddings or head not in shapes:
        return
    lo, hi = Shards.of(parameter_shapes(config), ranks).own("embed")
    if shapes[head] != shapes[embed] or not torch.equal(read(head, lo, hi), read(embed, lo, hi)):
        raise IsobitError(
            f"{where}: tensor lm_head.weight differs from the embedding; config.json must have "
            "tie_word_embeddings false"
        )


def outside(master: str, config: ModelConfig) -> str:
    """Return the Hugging Face tensor of a master outside the layers."""
    named = FAMILIES[config.family].modules.get(master)
    return _OUTSIDE[master] if named is None else f"model.{named[0]}.weight"


def parts(config: ModelConfig) -> Iterator[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """Yield for every master, in order, its name and the Hugging Face tensors that are its rows,
    with their shapes."""
    modules = FAMILIES[config.family].modules
    for master, shape in parameter_shapes(config).items():
        if master in _OUTSIDE:
            yield master, [(outside(master, config), shape)]
            continue
        _, index, *inside, name = master.split(".")
        base = name if name in _BARE else name.removesuffix("_bias")
        suffix = ".bias" if base != name else "" if name in _BARE else ".weight"
        linear, alias = config.is_linear(int(index)), f"linear.{base}"
        key = f"{inside[0]}.{base}" if inside else alias if linear and alias in modules else base
        if config.latent is not None and config.latent.q_rank is None:
            key = f"whole.{key}" if f"whole.{key}" in modules else key
        if key == "qkv" and int(index) >= config.num_stores:
            key = "queries.qkv"
        elif key == "qkv" and config.heads_of(int(index)).joint:
            key = "joint.qkv"
        named, heights = modules[key], _heights(base, shape[0], config, int(index))
        first = len(heights) - len(named) + 1  # the first tensor may have several matrices' rows
        heights = (sum(heights[:first]), *heights[first:])
        names = [f"model.layers.{index}.{module.format(*inside[1:])}{suffix}" for module in named]
        row = (
            (1, *shape[1:]) if base == name == "conv" else shape[1:]
        )  # a convolution's has one input for each channel
        yield master, [(n, (height, *row)) for n, height in zip(names, heights)]


def matrices(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the rows of each matrix in every master, also where a checkpoint has several in one
    tensor: queries, keys and values are three, and gate and up are two."""
    heights: dict[str, tuple[int, ...]] = {}
    for master, (rows, *_) in parameter_shapes(config).items():
        inside, _, name = master.rpartition(".")
        layer = int(master.split(".")[1]) if inside else 0
        heights[master] = _heights(name, rows, config, layer) if inside else (rows,)
    return heights


def _heights(base: str, rows: int, config: ModelConfig, layer: int) -> tuple[int, ...]:
    """Return the rows of each of the matrices that a master, or its bias, is made of."""
    by_head = config.linear is not None and config.linear.by_head
    if (base == "gates" and not by_head) or (base == "gate_up" and config.gated):
        return rows // 2, rows // 2
    if base == "qkv_a":
        assert config.latent is not None
        first = config.latent.first_rows(config.num_heads)
        return first, rows - first
    if base != "qkv":
        return (rows,)
    if config.linear is not None and config.is_linear(layer):
        return config.linear.heights
    if layer >= config.num_stores:
        return (rows,)
    heads = config.heads_of(layer)
    keys_and_values = (heads.width,) if heads.joint else (heads.width, heads.width)
    return rows - sum(keys_and_values), *keys_and_values


def layer_and_role(name: str) -> tuple[int, str]:
    """Return layer and role from a linear layer's name: (3, qkv) from `layers.3.qkv`, (3, experts
    down) from `layers.3.experts.7.down`, (3, shared down) from `layers.3.shared.down`."""
    words = name.split(".")
    inside = f"{words[2]} " if words[2] in ("experts", "shared") else ""
    return int(words[1]), f"{inside}{words[-1]}"
