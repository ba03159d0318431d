"""A model without numbers, on PyTorch's `meta` device, and what is counted of it.

It is made as any model is (`Transformer`), of tensors that have shapes and no storage, and its
operators compute nothing (`shape_ops.py`). So working weights, packs, and what a forward keeps
for its backward are those of the code that runs.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from isobit.config.sections import AdapterConfig
from isobit.distributed.weights import part_of
from isobit.model import ModelConfig
from isobit.model.adapters.low_rank import Adapter, factor_shapes
from isobit.model.adapters.targets import targeted
from isobit.model.build import Sources
from isobit.model.divided.by_rows import layout_of
from isobit.model.divided.heads import local_config
from isobit.model.divided.kept import kept_bytes
from isobit.model.forward.kv_scales import KVScales
from isobit.model.forward.storage import new_store
from isobit.model.hub.layer_inputs import LayerInputs
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.transformer import Transformer
from isobit.model.weights.layout import Working, nbytes
from isobit.precision import Precision
from isobit.training.plan.learning import Backward, beyond, measure, measure_forward
from isobit.training.plan.shape_ops import META, ShapeOps, empty

_FEW_LAYERS, _MORE_LAYERS = 3, 5
_MOST_TOKENS = 1 << 15  # that a measured micro-batch has


@dataclass(frozen=True)
class Described:
    """The properties that decide a model's bytes. `host`: on a CPU, where `packs`: weights are
    packed for products."""

    config: ModelConfig
    precision: Precision
    adapter: AdapterConfig | None = None
    host: bool = False
    packs: bool = False


@dataclass(frozen=True)
class WeightBytes:
    """The bytes of a model's weights: the rollout's working weights, those of the learner that are
    not shared with them, and the packed copies of both."""

    rollout: int
    learner: int
    packs: int

    @property
    def total(self) -> int:
        return self.rollout + self.learner + self.packs


class _Meta(Transformer):
    """A transformer without numbers, so a second engine's received weights are not compared."""

    def __init__(
        self, described: Described, masters: Mapping[str, Tensor], adapter: Adapter | None
    ) -> None:
        self.packs = described.packs
        super().__init__(
            described.config,
            described.precision,
            ShapeOps(described.packs),
            masters,
            adapter=adapter,
        )

    def _make(self, sources: Sources, uses: Sequence[str]) -> dict[str, Working]:
        if not self.precision.shared:
            self.ops["rollout"] = ShapeOps(self.packs, separate=True)
        return super()._make(sources, uses)

    def _send(self, names: Collection[str]) -> None:
        pass


@lru_cache(maxsize=1)
def transformer(described: Described) -> Transformer:
    """Build the model with tensors without storage; nothing in it may be written to."""
    config, adapter = described.config, None
    if described.adapter is not None:
        chosen, rank = targeted(config, described.adapter.targets), described.adapter.rank
        factors = {name: empty(*shape) for name, shape in factor_shapes(chosen, rank).items()}
        adapter = Adapter(rank, described.adapter.alpha, chosen, factors)
    masters = {name: empty(*shape) for name, shape in parameter_shapes(config).items()}
    model = _Meta(described, masters, adapter)
    model.calibrate(KVScales(torch.ones(config.num_layers, 3), model.weights_version))
    return model


@lru_cache
def weight_bytes(described: Described, frozen: bool = False) -> WeightBytes:
    """Return the bytes of a model's weights; for a `frozen` model those of the learner alone."""
    if (sizes := _fewer_layers(described)) is not None:
        few, more = (weight_bytes(smaller, frozen) for smaller in sizes)
        return _of_all(few, more, described)
    model = copy(transformer(described))
    if frozen:
        model.freeze()
    return WeightBytes(*model.working_bytes(), model.packed_bytes())


@lru_cache
def divided_bytes(described: Described, size: int) -> tuple[WeightBytes, int]:
    """Return the bytes on the busiest of `size` ranks that hold a model together: the rows that it
    keeps; then what the learner has open at a time: a layer with the next one, the embedding or
    the head."""
    if (sizes := _fewer_layers(described)) is not None:
        (few, _), (more, opened) = (divided_bytes(smaller, size) for smaller in sizes)
        return _of_all(few, more, described), opened
    working = transformer(described)._working["rollout"]
    layout, whole = layout_of(described.config, size), weight_bytes(described)
    rows = kept_bytes(working, layout, size - 1)  # the last rank's ranges are the largest
    sizes_of_parts = Counter[str]()
    for name, operand, _ in working.tensors():
        sizes_of_parts[part_of(name)] += nbytes(operand)
    layer = max(size for name, size in sizes_of_parts.items() if name.startswith("layers."))
    packs = whole.packs * rows // whole.rollout
    return WeightBytes(rows, 0, packs), layer + max(sizes_of_parts.values())


@lru_cache
def learning_bytes(described: Described, tokens: int, how: Backward) -> tuple[int, int]:
    """Return the most bytes of the forward and the head of a micro-batch, then of its layers'
    backward."""
    if tokens > _MOST_TOKENS:  # then bytes grow with tokens in a straight line
        half = _MOST_TOKENS // 2
        pairs = zip(learning_bytes(described, half, how), learning_bytes(described, 2 * half, how))
        forward, layers = (b + (b - a) * (tokens - 2 * half) // half for a, b in pairs)
        return forward, layers
    host, config = described.host, described.config
    if (sizes := _fewer_layers(described)) is None:
        peaks = [max(phase) for phase in measure(transformer(described), tokens, how, host=host)]
    else:
        few, more = (measure(transformer(size), tokens, how, host=host) for size in sizes)
        times = (config.num_layers - _MORE_LAYERS) / (_MORE_LAYERS - _FEW_LAYERS)
        peaks = [beyond(*phases, times) for phases in zip(few, more)]
    return max(peaks[:-1]), peaks[-1]


@lru_cache
def forward_bytes(described: Described, tokens: int) -> int:
    """Return the bytes of a rollout's forward of `tokens`."""
    # a layer's tensors are freed when it ends
    _, more = _fewer_layers(described) or (described, described)
    return measure_forward(transformer(more), tokens)


def _of_all(few: WeightBytes, more: WeightBytes, described: Described) -> WeightBytes:
    """Extrapolate the bytes of all layers from two models with fewer."""
    layers, step = described.config.num_layers - _MORE_LAYERS, _MORE_LAYERS - _FEW_LAYERS
    return WeightBytes(*(b + (b - a) // step * layers for a, b in zip(astuple(few), astuple(more))))


def _fewer_layers(described: Described) -> tuple[Described, Described] | None:
    """Return the model with few layers and with a few more, where all its layers are of one kind,
    so that the bytes of the remaining layers follow from the difference; else None."""
    config, precision, count = described.config, described.precision, described.config.num_layers
    kinds = {
        (
            precision.flow("rollout", layer, count),
            precision.flow("learner", layer, count),
            precision.backward(layer, count),
            config.is_linear(layer),
            config.is_mixture(layer),
            config.window(layer),
            config.rope_of(layer),
        )
        for layer in range(count)
    }
    alike = not config.windows and config.linear is None and config.inputs == LayerInputs()
    if len(kinds) > 1 or not alike or count <= 2 * _MORE_LAYERS:
        return None
    few, more = (
        replace(described, config=replace(config, num_layers=n))
        for n in (_FEW_LAYERS, _MORE_LAYERS)
    )
    return few, more


@lru_cache
def page_bytes(described: Described, page_size: int, size: int = 1) -> int:
    """Return the bytes of one page of keys and values, plus states, in all layers; of the heads
    that one of `size` ranks has, which hold the model together."""
    config, total = described.config, 0
    if size > 1:
        config = local_config(config, layout_of(config, size), size - 1)
    for layer in range(config.num_stores):
        flow = described.precision.flow("rollout", layer, config.num_layers)
        total += new_store(config, layer, flow, 1, page_size, META, flow.kv).nbytes
    return total
