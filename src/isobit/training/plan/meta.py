"""A model without numbers, on PyTorch's `meta` device, and what is counted of it.

It is made as any model is (`Transformer`), of tensors that have shapes and no storage, and its
operators compute nothing (`shape_ops.py`). So working weights, packs, and what a forward keeps
for its backward are those of the code that runs.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from isobit.config.sections import AdapterConfig
from isobit.kernels.sampling.filtering import Filtering
from isobit.model import ModelConfig
from isobit.model.adapters.low_rank import Adapter, factor_shapes
from isobit.model.adapters.targets import targeted
from isobit.model.build import Sources
from isobit.model.forward.kv_scales import KVScales
from isobit.model.forward.recompute import Recompute
from isobit.model.forward.storage import new_store
from isobit.model.hub.layer_inputs import LayerInputs
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.transformer import Transformer
from isobit.model.weights.layout import Working
from isobit.precision import Precision
from isobit.training.plan.learning import (
    LearningMemory,
    Passes,
    Phase,
    carried,
    carried_forward,
    forward_passes,
    passes,
)
from isobit.training.plan.shape_ops import META, ShapeOps, empty

_FEW_LAYERS, _MORE_LAYERS = 3, 5


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
    """Bytes of the rollout's working weights, of those that the learner has besides, and of the
    packs of both."""

    rollout: int
    learner: int
    packs: int

    @property
    def total(self) -> int:
        return self.rollout + self.learner + self.packs


class _Meta(Transformer):
    """A transformer without numbers, so a second engine's received weights are not compared."""

    def __init__(
        self, given: Described, masters: Mapping[str, Tensor], adapter: Adapter | None
    ) -> None:
        self.packs = given.packs
        super().__init__(
            given.config, given.precision, ShapeOps(given.packs), masters, adapter=adapter
        )

    def _make(self, sources: Sources, uses: Sequence[str]) -> dict[str, Working]:
        if not self.precision.shared:
            self.ops["rollout"] = ShapeOps(self.packs, separate=True)
        return super()._make(sources, uses)

    def _send(self, names: Collection[str]) -> None:
        pass


@lru_cache(maxsize=1)
def transformer(given: Described) -> Transformer:
    """Return the model; nothing in it may be written to."""
    config, adapter = given.config, None
    if given.adapter is not None:
        chosen, rank = targeted(config, given.adapter.targets), given.adapter.rank
        factors = {name: empty(*shape) for name, shape in factor_shapes(chosen, rank).items()}
        adapter = Adapter(rank, given.adapter.alpha, chosen, factors)
    masters = {name: empty(*shape) for name, shape in parameter_shapes(config).items()}
    model = _Meta(given, masters, adapter)
    model.calibrate(KVScales(torch.ones(config.num_layers, 3), model.weights_version))
    return model


@lru_cache
def weight_bytes(given: Described, frozen: bool = False) -> WeightBytes:
    """Return the bytes of a model's weights; of one that nothing trains (`frozen`) the learner's
    alone."""
    if (others := _fewer_layers(given)) is not None:
        few, more = (weight_bytes(each, frozen) for each in others)
        layers, step = given.config.num_layers - _MORE_LAYERS, _MORE_LAYERS - _FEW_LAYERS
        pairs = zip(astuple(few), astuple(more))
        return WeightBytes(*(b + (b - a) // step * layers for a, b in pairs))
    model = copy(transformer(given))
    if frozen:
        model.freeze()
    return WeightBytes(*model.working_bytes(), model.packed_bytes())


@lru_cache
def learning_bytes(
    given: Described,
    recompute: Recompute,
    kept: bool = False,
    entropy: bool = False,
    tied: bool = False,
    filtering: Filtering | None = None,
) -> LearningMemory:
    """Return the memory of micro-batches under a level of activation checkpointing; with the
    gradients, where they are `kept`; where the loss has the `entropy` too; where embedding and
    head, which are `tied`, add to one gradient; where the distribution has a `filtering`."""
    found = _of_all_layers(given, recompute, kept, entropy, tied, filtering)
    return carried(found, given.config, host=given.host)


@lru_cache
def forward_bytes(given: Described) -> Phase:
    """Return the phase of a rollout's forward."""
    _, more = _fewer_layers(given) or (given, given)  # a layer's tensors are freed when it ends
    return carried_forward(forward_passes(transformer(more)), given.config)


def _of_all_layers(
    given: Described,
    recompute: Recompute,
    kept: bool,
    entropy: bool,
    tied: bool,
    filtering: Filtering | None,
) -> Passes:
    how = recompute, kept, entropy, tied, filtering
    if (others := _fewer_layers(given)) is None:
        return passes(transformer(given), *how)
    few, more = (passes(transformer(each), *how) for each in others)
    return few.of_layers(
        more, (given.config.num_layers - _MORE_LAYERS) / (_MORE_LAYERS - _FEW_LAYERS)
    )


def _fewer_layers(given: Described) -> tuple[Described, Described] | None:
    """Return the same with some of its layers, and with a few more, where all layers are of one
    kind: the bytes of the others follow. Else None."""
    config, precision, count = given.config, given.precision, given.config.num_layers
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
        replace(given, config=replace(config, num_layers=n)) for n in (_FEW_LAYERS, _MORE_LAYERS)
    )
    return few, more


@lru_cache
def page_bytes(given: Described, page_size: int) -> int:
    """Return the bytes of a page of keys and values, and of states, in all layers."""
    config, total = given.config, 0
    for layer in range(config.num_stores):
        flow = given.precision.flow("rollout", layer, config.num_layers)
        total += new_store(config, layer, flow, 1, page_size, META, flow.kv).nbytes
    return total
