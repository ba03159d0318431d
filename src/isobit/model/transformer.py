"""One transformer for rollout, learner and reference: all families in the same forward.

The parameters are masters, FP32 or BF16. `sync` makes *working* weights of them, once per flow:
quantized, or in the compute format. A rollout and a learner with one flow share one storage of
working weights, so neither can be stale; a rollout on a separate engine receives a copy and has its
own operators. The forward takes rows and a layout, so decoding, chunked prefill and the learner's
packed sequences are the same code.

Query, key and value projections are one matrix, and so are gate and up. Left out: where weights
come from (`model.py`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError
from isobit.kernels import (
    Layout,
    Ops,
    Prepared,
    Store,
    StoredWeight,
    inference_engine_ops,
    tensors_of,
)
from isobit.kernels.sampling.filtering import Context, Filtering
from isobit.model.adapters.low_rank import Adapter
from isobit.model.adapters.multi_lora import Assignment, MultiLora
from isobit.model.adapters.targets import projections
from isobit.model.build import Made, Sources, factors, make_working, with_adapter
from isobit.model.divided.by_rows import divided_weights, kept_by_rows
from isobit.model.families.rope import Tables, make_tables
from isobit.model.forward.head import head_logprobs, head_rows
from isobit.model.forward.head_divergence import DivergenceOf, Other, head_divergence
from isobit.model.forward.kv_scales import KVScales, scales_of
from isobit.model.forward.layers import Pass, Watch, forward
from isobit.model.forward.moe import RouteTape
from isobit.model.forward.recompute import Recompute
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.images.bank import Bank
from isobit.model.weights.checksums import Checksums
from isobit.model.weights.divided import opened, reopened
from isobit.model.weights.layout import Working, map_parts, nbytes, remake
from isobit.model.weights.masters import Masters, own_rows
from isobit.model.weights.stored import Vector, Weight
from isobit.model.weights.sync import Receiver
from isobit.model.weights.written import names_of, written
from isobit.precision import Precision

USES = ("rollout", "learner")


class Transformer:
    """The masters, the working weights and the forward.

    `masters` are those of `parameter_shapes`, which defines their names and order: all their rows,
    or those that this one of several `ranks` keeps. After changing them call `sync`, with their
    names if not all of them changed. None: another process has the masters, and sends the rollout's
    working weights (`engine/fleet/weight_bytes.py`), the only weights here.

    The ranks of a `group` hold one copy of the working weights together, each its rows: the forward
    opens them, and `by_rows` multiplies by them in rollouts.

    With an `adapter` nothing else is trained: `masters` are whole, each is read once, made a
    working weight and not kept, and the masters here are the adapter's. `dtype` is that of the
    masters here.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        ops: Ops,
        masters: Mapping[str, Tensor] | None,
        ranks: Ranks = ALONE,
        adapter: Adapter | None = None,
        dtype: torch.dtype = torch.float32,
        group: Ranks = ALONE,
    ) -> None:
        shapes = parameter_shapes(config) if adapter is None else adapter.shapes
        if masters is None:
            self.masters = Masters.elsewhere(shapes, ops.device)
        else:
            trained = masters if adapter is None else own_rows(adapter.tensors, ranks)
            self.masters = Masters(trained, shapes, ops.device, ranks, dtype)
        self.adapter = None if adapter is None else replace(adapter, tensors={})
        self.config, self.precision = config, precision
        self.ops: dict[str, Ops] = {
            "rollout": ops if precision.shared else inference_engine_ops(ops),
            "learner": ops,
        }
        ops.check_precision(precision)
        self._version = 0
        self.group, self.divided = group, divided_weights(config, precision, group)
        self.by_rows: Transformer | None = None
        self.shares: Sequence[Callable[[], None]] = ()  # copy a share (`divided/by_rows.py`)
        self.served: MultiLora | None = None  # the adapters that rollouts name (`serving`)
        self.images: Bank | None = None  # those that token ids above the vocabulary name
        self._kv_scales: KVScales | None = None
        self._watches: dict[str, Watch] = {}
        layers = range(config.num_layers)
        self._ropes = {(config.rope_of(layer), config.heads_of(layer).dim) for layer in layers}
        self._tables = self._tables_of(0)
        self._receiver = None if precision.shared or masters is None else Receiver()
        leaves = self.masters.leaves
        sources = Sources(leaves) if adapter is None else Sources(masters or {}, adapter, leaves)
        self._working = self._make(sources, USES if masters is not None else ("rollout",))
        self.checksums = Checksums(self._written_by_sync)
        if masters is not None and self.masters.apart:
            self._remake(self.masters.leaves)
        self.by_rows = kept_by_rows(self)
        self._send(self.masters.leaves)
        ops.raise_faults()

    @torch.no_grad()
    def sync(self, rollout: bool = True, names: Collection[str] | None = None) -> None:
        """Overwrite the working weights of these masters, by default of all, for both uses, and
        count up the version.

        A separate rollout engine receives its copy, unless `rollout` is False. Raises RunFailed,
        naming the tensor, if one arrives broken.
        """
        known = self.masters.leaves
        assert known, "a frozen model has no masters to sync from"
        ops, names = self.ops["learner"], known if names is None else names
        assert all(name in known for name in names), f"masters are {', '.join(known)}"
        self._remake(names)
        if rollout:
            self._send(names)
        ops.raise_faults()
        self._version += 1
        if self.by_rows is not None:
            self.by_rows.received(self._version)
        self.checksums.renew()

    def _remake(self, names: Collection[str]) -> None:
        """Overwrite the working weights of these masters, where they are kept."""
        ops = self.ops["learner"]
        if self.divided is not None:
            self.divided.make(self.masters, names, ops)
            names = [name for name in names if not self.divided.layout.divided(name)]
        remake(self._synced, ops, self.masters, names)

    @property
    def weights_version(self) -> int:
        """Counts syncs: every change of the working weights."""
        return self._version

    def count_from(self, version: int) -> None:
        """Set the version of the working weights: a resumed run continues its count."""
        self._version = version
        if self.by_rows is not None:
            self.by_rows.count_from(version)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The rows of the masters that this rank keeps, by name."""
        return self.masters.parameters

    @property
    def _synced(self) -> list[Working]:
        """The working weights that a sync computes from the masters; a separate rollout receives
        its copy afterwards."""
        return (
            list(self._working.values()) if self._receiver is None else [self._working["learner"]]
        )

    @torch.no_grad()
    def _make(self, sources: Sources, uses: Sequence[str]) -> dict[str, Working]:
        made: Made = {}  # so that what has one flow and one engine has one storage
        arguments = self.config, self.precision, self.ops["learner"], sources
        shared = self.precision.shared
        working = {
            use: make_working(*arguments, use, made if shared else {}, self.ops[use], self.divided)
            for use in uses
        }
        return {use: working.get(use, working["rollout"]) for use in USES}

    @torch.no_grad()
    def _send(self, names: Collection[str]) -> None:
        if self._receiver is not None and names:  # a frozen model without an adapter has none
            self._receiver.receive(
                self._working["rollout"],
                self.ops["learner"],
                self.ops["rollout"],
                self.masters,
                names,
            )

    def freeze(self) -> None:
        """Keep only the learner's working weights; from then on there are neither gradients,
        rollout weights nor syncs."""
        nothing = torch.empty(0)

        def without_master(parameter: Weight | Vector) -> Weight | Vector:
            if isinstance(parameter, Weight):
                return replace(parameter, master=nothing, bias_master=None)
            return replace(parameter, master=nothing)

        frozen = map_parts(self._working["learner"], without_master)
        self._working, self._receiver = dict.fromkeys(USES, frozen), None
        self.masters = Masters({}, {}, self.ops["learner"].device, self.masters.shards.ranks)

    def without_adapter(self) -> "Transformer":
        """Return a frozen model over the same storage, its adapter switched off; scales of a KV
        cache are its own."""
        assert self.adapter is not None

        def bare(parameter: Weight | Vector) -> Weight | Vector:
            return replace(parameter, adapters=()) if isinstance(parameter, Weight) else parameter

        clone = copy(self)
        clone.adapter, clone._kv_scales, clone._watches = None, None, {}
        clone._working = {use: map_parts(working, bare) for use, working in self._working.items()}
        clone.masters = Masters({}, {}, self.ops["learner"].device, self.masters.shards.ranks)
        clone.by_rows = kept_by_rows(clone)
        clone.checksums = Checksums(clone._written_by_sync)
        return clone

    @torch.no_grad()
    def adapted(self, adapter: Adapter) -> "Transformer":
        """Return a model over the same frozen storage whose masters are a copy of an adapter's
        factors."""
        clone, ops = copy(self), self.ops["learner"]
        clone.adapter, clone.served = replace(adapter, tensors={}), None
        copied = {name: factor.clone() for name, factor in adapter.tensors.items()}
        ranks = self.masters.shards.ranks
        clone.masters = Masters(own_rows(copied, ranks), adapter.shapes, ops.device, ranks)
        leaves = clone.masters.leaves
        sources = Sources({}, adapter, leaves)
        clone._working = with_adapter(self._working, self.precision, self.ops, sources)
        clone._version, clone._kv_scales, clone._watches = 0, None, {}
        clone._receiver = None if self.precision.shared else Receiver()
        if clone.masters.apart:
            remake(clone._synced, ops, clone.masters, leaves)
        clone.by_rows = kept_by_rows(clone)
        clone.checksums = Checksums(clone._written_by_sync)
        clone._send(leaves)
        ops.raise_faults()
        return clone

    def serving(self, adapters: Mapping[str, Adapter]) -> "Transformer":
        """Return a frozen model over the same storage that rolls out several adapters at once, each
        by its name, and takes more later (`add_adapter`). Raises IsobitError for a flow whose KV
        cache is calibrated, or in which rows of one batch share scales, and for ranks that hold a
        model together."""
        if self.group.size > 1:
            raise IsobitError("ranks that hold a model together do not serve several adapters")
        if (reason := self.precision.varies_with_batch()) is not None:
            raise IsobitError(
                f"precision {self.precision.name}: {reason}, so also by those of several adapters; "
                "serve them one at a time, or take activation_granularity: 1x128 or row"
            )
        if self.precision.calibrated:
            raise IsobitError(
                f"precision {self.precision.name} calibrates its KV cache, and each of several "
                "adapters would need scales of its own; serve them one at a time, or take fp8"
            )
        clone, serving = copy(self if self.adapter is None else self.without_adapter()), MultiLora()
        adaptable = {proj.weight for proj in projections(self.config)}

        def change(parameter: Weight | Vector) -> Weight | Vector:
            if not isinstance(parameter, Weight) or parameter.name not in adaptable:
                return parameter
            return replace(parameter, several=serving.of(parameter.name))

        clone._working = {**clone._working, "rollout": map_parts(clone._working["rollout"], change)}
        clone.served, clone._watches = serving, {}
        clone.masters = Masters({}, {}, self.ops["learner"].device, self.masters.shards.ranks)
        clone.checksums = Checksums(clone._written_by_sync)
        for name, adapter in adapters.items():
            clone.add_adapter(name, adapter)
        return clone

    @torch.no_grad()
    def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Serve one more adapter from the next forward on. Raises IsobitError for a name that was
        used before."""
        assert self.served is not None
        compute, ops = self.precision.rollout.compute, self.ops["rollout"]
        self.served.enter(name, lambda weight: factors(weight, adapter, compute, ops))

    @property
    def sync_bytes(self) -> int:
        """Bytes that the last sync sent to the rollout: 0 if the engines share one storage."""
        return 0 if self._receiver is None else self._receiver.bytes

    def hidden(
        self,
        tokens: Tensor,
        layout: Layout,
        stores: Sequence[Store] | None = None,
        use: str = "learner",
        tape: RouteTape | None = None,
        *,
        recompute: Recompute = False,
        calibrating: bool = False,
        adapters: Assignment | None = None,
        images: bool = True,
    ) -> Tensor:
        """Hidden states [T, hidden] after the final norm, for tokens [T] int64, which may name rows of
        `images`, but in a captured step.

        `stores` hold the keys and values, or states, of earlier rows and receive the new ones, one
        per layer; without them the rows are whole packed sequences, stored for this forward only.
        `adapters`: which rows are by which of those that are `served`; None: by none. The other
        arguments are described in `Pass`.
        """
        ops = self.ops[use]
        tokens, layout = tokens.to(ops.device), layout.to(ops.device)
        pass_ = Pass(
            config=self.config,
            ops=ops,
            layout=layout,
            tables=self.rope_tables(layout),
            masters=self.masters.leaves,
            stores=stores,
            scales=self.kv_scales,
            tape=tape,
            watch=self._watches.get(use),
            recompute=recompute if stores is None and torch.is_grad_enabled() else False,
            calibrating=calibrating,
            divided=self.divided,
            images=self.images if images else None,
        )
        served = self.served if use == "rollout" else None
        with nullcontext() if served is None else served.forward(len(tokens), adapters):
            return forward(tokens, self._working[use], pass_)

    @contextmanager
    def watched(self, watch: Watch, use: str = "learner") -> Iterator[None]:
        """Let forwards of a use compute, inside this context, with the operators that `watch`
        returns for each layer; an earlier watch is suspended."""
        previous = self._watches
        self._watches = previous | {use: watch}
        try:
            yield
        finally:
            self._watches = previous

    def head_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        use: str = "learner",
        chunk: int | None = None,
        filtering: Filtering | None = None,
        context: Context | None = None,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return (log-probability of `targets`, entropy) [T] float32, in chunks of rows: [T,
        vocabulary] at once only to `keep` them for the backward."""
        rows, ops = chunk if chunk is not None else self.head_rows, self.ops[use]
        arguments = self._opened_head(use), targets, temperature, rows, ops
        results = head_logprobs(hidden, *arguments, filtering, context, self.config.logit_cap, keep)
        return reopened(self.divided, arguments[0].name, *results)

    def head_divergence(self, hidden: Tensor, other: Other, divergence: DivergenceOf) -> Tensor:
        """Return the divergence [T] float32 of the learner's logits from another model's, in chunks
        of rows."""
        head, ops = self._opened_head("learner"), self.ops["learner"]
        rows, cap = self.head_rows, self.config.logit_cap
        distance = head_divergence(hidden, head, other, divergence, rows, ops, cap)
        return reopened(self.divided, head.name, distance)[0]

    def head_weight(self, use: str = "learner") -> Prepared:
        """Return the output head [vocabulary, hidden], prepared for products."""
        return self._opened_head(use).prepared

    def _opened_head(self, use: str) -> Weight:
        head = self._working[use].outside.head
        opened(self.divided, head.name)
        return head

    def rollout_tensors(self) -> list[tuple[str, StoredWeight]]:
        """Return (name, working tensor) of each that the rollout stores, in an order that depends
        on the model alone."""
        return [(name, operand) for name, operand, _ in self._working["rollout"].tensors()]

    def received(self, version: int) -> None:
        """Note that the rollout's working weights were overwritten by those of a version."""
        self._version = version
        self.repacked("rollout")

    @torch.no_grad()
    def repacked(self, use: str = "learner") -> None:
        """Pack the working weights of a use again, which were overwritten."""
        for copy_share in self.shares:
            copy_share()
        for packed in self._working[use].packs().values():
            self.ops[use].prepare(packed.weight, packed)
        if self.divided is not None and self.by_rows is not None:
            self.divided.close()
            self.by_rows.repacked("rollout")
        self.checksums.renew()

    def learner_storage(self) -> list[Tensor]:
        """Return the tensors of the learner's working weights, in an order that depends on the
        model alone."""
        learner = self._working["learner"].tensors()
        whole = (w for _, w, _ in learner if not (self.divided and self.divided.has(w)))
        tensors = [tensor for operand in whole for tensor in tensors_of(operand)]
        return tensors if self.by_rows is None else tensors + self.by_rows.learner_storage()

    def rollout_storage(self) -> tuple[int, ...]:
        """Return what says where the rollout's working weights are, from which a captured graph
        reads, and which scales its queries have."""
        operands = (operand for _, operand, _ in self._working["rollout"].tensors())
        weights = [tensor.data_ptr() for operand in operands for tensor in tensors_of(operand)]
        scales = self._kv_scales if self.precision.calibrated_queries else None
        return (*weights, *self._working["rollout"].packs(), id(scales))

    @property
    def head_rows(self) -> int:
        """Rows of logits that `head_logprobs` holds at a time."""
        return head_rows(self.config.vocab_size, host=self.ops["learner"].device.type == "cpu")

    def rollout_weights(self) -> list[Weight]:
        """Return the linear layers as the rollout multiplies them."""
        return list(self._working["rollout"].linear_layers())

    def working_names(self, use: str) -> dict[int, str]:
        """Return the names of a use's working weights, by `id` of what operators receive."""
        return names_of(self._working[use])

    def working_bytes(self) -> tuple[int, int]:
        """Return (bytes of the rollout's working weights, bytes of the learner's that the rollout
        does not share)."""
        if self.by_rows is not None:
            return self.by_rows.working_bytes()[0], 0
        rollout, learner = (
            {id(t): nbytes(t) for _, t, _ in self._working[use].tensors()} for use in USES
        )
        return sum(rollout.values()), sum(learner[key] for key in learner.keys() - rollout.keys())

    def packed_bytes(self) -> int:
        """Return the bytes of the backend's packs, which come on top of the working weights."""
        if self.by_rows is not None:
            return self.by_rows.packed_bytes()
        packs = dict(pack for working in self._working.values() for pack in working.packs().items())
        return sum(packed.nbytes for packed in packs.values())

    def _written_by_sync(self) -> dict[str, Tensor]:
        """Return what `written` does; of weights that ranks hold together what this one keeps."""
        if self.by_rows is not None:
            return self.by_rows._written_by_sync()
        return written(self._working, apart=self._receiver is not None)

    @property
    def kv_scales(self) -> KVScales | None:
        """The calibrated scales of the KV cache, with those of queries if the flow has them; None
        before calibration."""
        return self._kv_scales

    def calibrate(self, scales: KVScales | None) -> None:
        """Use these scales from now on."""
        self._kv_scales = scales

    def layer_scales(self, layer: int) -> Tensor:
        """Return the calibrated scales [2] of K and V. Raises IsobitError before calibration."""
        return scales_of(self._kv_scales)[layer, :2]

    def check_scales(self) -> None:
        """Raise IsobitError unless the calibrated scales, where a rollout has them, are of the
        present weights."""
        if not (self.precision.rollout.calibrated or self.precision.rollout.calibrated_queries):
            return
        version = -1 if self._kv_scales is None else self._kv_scales.version
        if version != self.weights_version:
            unequal = (
                "not calibrated"
                if self._kv_scales is None
                else f"those of version {version} of the weights"
            )
            raise IsobitError(
                f"the scales of the KV cache are {unequal}, and the weights are at version "
                f"{self.weights_version}: call Engine.calibrate(prompts) after every sync"
            )

    def rope_tables(self, layout: Layout) -> Tables:
        """Return the present rotary tables; a forward with a longer context replaces them."""
        needed, cos = layout.max_keys, next(iter(self._tables.values())).cos
        if needed > cos.shape[0]:
            size = min(max(needed, 2 * cos.shape[0], 64), max(needed, self.config.max_positions))
            self._tables = self._tables_of(size)
        return self._tables

    def _tables_of(self, positions: int) -> Tables:
        device = self.ops["learner"].device
        return make_tables(self._ropes, positions, self.config.max_positions, device)
