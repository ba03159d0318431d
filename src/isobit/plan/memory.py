"""Bytes of one GPU, by what they are for.

ZeRO-2 by blocks of 128 rows: masters, AdamW's moments and the sums of gradients are divided among the ranks, 16 bytes a
parameter in all, or 14 with BF16 masters; working weights are whole on every rank, since rollouts need them. With an
adapter the masters are its factors, and the model has working weights alone. What is held and what is saved for the
backward is what a run on a CPU reports (`tests/plan/test_against_runs.py`). Left out: what an allocator keeps of freed
memory, and the buffers of the driver and of collectives; `warnings.py` asks for a tenth of the memory for these.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from isobit.config.sections import AdapterConfig
from isobit.distributed import shards
from isobit.engine.pages import tokens_of_a_page
from isobit.model import ModelConfig
from isobit.model.adapters.low_rank import factor_shapes
from isobit.model.adapters.targets import targeted
from isobit.model.build import in_nibbles
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.weights.masters import MASTERS
from isobit.plan.activations import backward_bytes, gate_bytes, kept_bytes
from isobit.plan.job import Job
from isobit.precision import E2M1, Flow, Precision, QuantSpec, packed_fp4
from isobit.precision.flow import LINEAR_LAYERS
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import bytes_of_state

HEAD_ELEMENTS = 1 << 28
"""Logits that the learner holds at a time on a GPU (`Transformer.head_rows`)."""
HEAD_ROWS = 16
"""But of so many rows."""
_LOGITS = 12  # bytes of each: float32, its probability and its gradient
_CACHE_FRACTION = 3  # of the memory that weights, moments and gradients leave, for an engine's keys and values
Item = tuple[str, float]
Kind = tuple[int | None, str, tuple[int, ...]]
"""Layer, or None outside the layers; role, the last part of the name; shape."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the busiest rank: `held` all the time, and of `parts` one at a time. `cache_tokens`: tokens whose keys
    and values the rollout's cache holds; `longest`: such tokens of the longest sequence."""

    held: tuple[Item, ...]
    parts: tuple[Item, ...]
    cache_tokens: float
    longest: int

    @property
    def total(self) -> float:
        return sum(size for _, size in self.held) + max(size for _, size in self.parts)


@dataclass(frozen=True)
class Weights:
    """Bytes of working weights: codes with their scales; what stays in the compute format; routers, and gates of linear
    attention, in FP32; and what
    the learner has besides the rollout's, by itself or because it has an engine of its own."""

    quantized: float
    plain: float
    router: float
    own: float

    @property
    def total(self) -> float:
        return self.quantized + self.plain + self.router + self.own


def memory(job: Job) -> Memory:
    """The memory of the busiest rank."""
    adapter, trained = job.config.adapter, job.config.optimizer.masters
    size, shard = weights(job.model, job.precision, adapter=adapter), largest_share(job.model, job.ranks, adapter)
    weighing = [
        (_weights_label(job), size.quantized),
        ("working weights in the compute format", size.plain),
        ("routers and gates of linear attention in FP32" if job.model.linear else "routers in FP32", size.router),
        ("working weights of the learner alone", size.own),
        (
            f"{trained.upper()} masters{'' if adapter is None else ' of the adapter'}, this rank's rows",
            MASTERS[trained].itemsize * float(shard),
        ),
    ]
    if job.reference is not None and not job.config.shares_reference:
        weighing.append(("reference model, on every rank", weights(*job.reference, frozen=True).total))
    if job.rewards:
        weighing.append(
            ("reward models, on every rank", sum(weights(*each, frozen=True).total for each in job.rewards))
        )
    moving = [
        (
            f"{job.config.optimizer.what_is_kept}, this rank's rows",
            moment_bytes(job.model, job.config.optimizer, adapter) * _fraction(job, shard),
        ),
        ("FP32 gradients, this rank's rows", 4.0 * shard),
    ]
    free = max(job.device.memory - sum(each for _, each in (*weighing, *moving)), 0.0)
    per_token = cache_bytes_of_a_token(job.model, job.precision, job.page_size)
    pages = cache_pages(job, job.completions_of_a_rank, free / _CACHE_FRACTION)
    tokens = pages * job.page_size
    what = "keys and values" if job.model.linear is None else "keys, values and states"
    cache = [(what, tokens * per_token)]
    if job.config.evaluation.every:
        evaluated = job.config.evaluation.samples * max(1, job.config.evaluation.num_samples)
        more = cache_pages(job, -(-evaluated // job.ranks), (free - tokens * per_token) / _CACHE_FRACTION)
        cache.append((f"{what} of the evaluation", more * job.page_size * per_token))
    held = [item for item in (*weighing, *moving) if item[1]]
    longest = job.pages_of_a_sequence * job.page_size
    if not _sleeps(job):
        return Memory((*held, *cache), (_learning(job), _rolling_out(job)), tokens, longest)
    label, size_out = _rolling_out(job)
    awake = (f"{label}, {what}", size_out + sum(each for _, each in cache))
    return Memory(tuple(held), (_learning(job), awake), tokens, longest)


def _weights_label(job: Job) -> str:
    spec = job.precision.rollout.weight
    if spec is None or spec.format is not E2M1:
        return "working weights in FP8, with scales"
    packed = job.config.adapter is not None and packed_fp4.holds(spec, (16, job.model.hidden_size))
    return f"working weights in FP4, {'two codes' if packed else 'one code'} to a byte, with scales"


def _fraction(job: Job, shard: float) -> float:
    return shard / num_parameters(job.model, job.config.adapter)


def _sleeps(job: Job) -> bool:
    """Whether the cache is freed while the learner works; as `training/learning.py` decides on a GPU."""
    engine = job.config.engine
    return engine.sleep == "always" or (engine.sleep == "auto" and not engine.cuda_graphs)


@lru_cache
def trained(config: ModelConfig, adapter: AdapterConfig | None = None) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of all masters: the model's, or an adapter's."""
    if adapter is None:
        return parameter_shapes(config)
    return factor_shapes(targeted(config, adapter.targets), adapter.rank)


@lru_cache
def masters(config: ModelConfig, adapter: AdapterConfig | None = None) -> Mapping[Kind, int]:
    """How many masters of each kind there are: a layer's experts are alike."""
    found: Counter[Kind] = Counter()
    for name, shape in trained(config, adapter).items():
        found[int(name.split(".")[1]) if name.startswith("layers.") else None, name.rpartition(".")[2], shape] += 1
    return found


@lru_cache
def largest_share(config: ModelConfig, ranks: int, adapter: AdapterConfig | None = None) -> int:
    """Parameters whose masters the busiest of the ranks keeps."""
    return shards.largest_share(trained(config, adapter).values(), ranks)


@lru_cache
def num_parameters(config: ModelConfig, adapter: AdapterConfig | None = None) -> int:
    """Of the whole model, or of an adapter."""
    return sum(count * math.prod(shape) for (_, _, shape), count in masters(config, adapter).items())


@lru_cache
def weights(
    config: ModelConfig, precision: Precision, frozen: bool = False, adapter: AdapterConfig | None = None
) -> Weights:
    """Working weights of both uses, and an adapter's; of a `frozen` model the learner's only."""
    vectors = {"sinks", "conv", "decay", "step_bias"}
    vectors |= {"final_norm", "q_norm", "k_norm", *config.norms} if config.norm_offset else set()
    found = {"quantized": 0.0, "plain": 0.0, "router": 0.0, "own": 0.0}
    for (layer, role, shape), count in masters(config).items():
        rollout, learner = (precision.flow(use, layer, config.num_layers) for use in ("rollout", "learner"))
        exact = role in vectors
        dgrad = None if adapter is None else precision.backward(layer or 0, config.num_layers)[0]
        kind, size = _working(role, shape, learner if frozen else rollout, precision, exact, dgrad)
        found[kind] += count * size
        if not frozen and not (precision.shared and rollout == learner):
            found["own"] += count * _working(role, shape, learner, precision, exact, dgrad)[1]
    if adapter is not None:
        factors = adapter_bytes(config, precision, adapter)
        found["plain"] += factors
        found["own"] += 0.0 if precision.shared else factors
    return Weights(**found)


@lru_cache
def packed_bytes(
    config: ModelConfig, precision: Precision, adapter: AdapterConfig | None = None, frozen: bool = False
) -> float:
    """What a CPU's backend packs of the weights of products: their codes or numbers once more, for each use that has
    its own; of a `frozen` model for the learner's."""
    total = 0.0
    for (layer, role, shape), count in masters(config).items():
        flows = [precision.flow(use, layer, config.num_layers) for use in ("learner", "rollout")]
        dgrad = None if adapter is None else precision.backward(layer or 0, config.num_layers)[0]
        for flow in flows[: 1 if frozen or (precision.shared and flows[0] == flows[1]) else 2]:
            spec = precision.linear_flow(flow, role).weight if role in LINEAR_LAYERS else None
            packed = role in (*LINEAR_LAYERS, "head", *(("embed",) if config.tie_embeddings else ()))
            if packed and not (spec is not None and dgrad is not None and in_nibbles(spec, shape, dgrad)):
                total += count * math.prod(shape) * (flow.compute.itemsize if spec is None else 1)
    return total


def adapter_bytes(config: ModelConfig, precision: Precision, adapter: AdapterConfig) -> float:
    """Working factors of one use."""
    return float(precision.rollout.compute.itemsize * num_parameters(config, adapter))


def _working(
    role: str, shape: tuple[int, ...], flow: Flow, precision: Precision, exact: bool, dgrad: str | None
) -> tuple[str, float]:
    """(kind, bytes) of one working weight; `exact`: it is float32 in any case; `dgrad`: how that runs beside an
    adapter, None without."""
    count = math.prod(shape)
    if role in ("router", "router_bias", "gates"):
        return "router", 4.0 * count
    if role in LINEAR_LAYERS:
        spec = precision.linear_flow(flow, role).weight
        if spec is not None and dgrad is not None and in_nibbles(spec, shape, dgrad):
            return "quantized", packed_fp4.nbytes(shape[0], shape[1])
        if spec is not None:
            return "quantized", quantized_bytes(shape[0], shape[1], spec)
    return "plain", float((4 if exact else flow.compute.itemsize) * count)


def quantized_bytes(rows: float, columns: int, spec: QuantSpec) -> float:
    """Codes, a byte each, and a float32 scale for each block."""
    high, wide = spec.block((int(rows), columns))
    return rows * columns + 4 * math.ceil(rows / high) * math.ceil(columns / wide)


def moment_bytes(config: ModelConfig, settings: OptimizerSettings, adapter: AdapterConfig | None = None) -> float:
    """What the optimizer keeps of all that is trained."""
    found = masters(config, adapter).items()
    return sum(times * bytes_of_state(role, shape, settings) for (_, role, shape), times in found)


def cache_bytes_of_a_token(config: ModelConfig, precision: Precision, page_size: int | None = None) -> float:
    """Keys and values of one token in all layers, with their scales, and its part of the states of linear attention,
    which each page has one of; `page_size` as in an engine."""
    width, total, size = config.num_kv_heads * config.head_dim, 0.0, tokens_of_a_page(config, page_size)
    for layer in range(config.num_layers):
        flow = precision.flow("rollout", layer, config.num_layers)
        if config.linear is not None and config.is_linear(layer):
            inputs = flow.compute.itemsize * (config.linear.width - 1) * config.linear.channels
            total += (4 * math.prod(config.linear.state) + inputs) / size
        elif flow.kv is None:
            total += 2 * flow.compute.itemsize * width
        else:
            total += 2 * width + (0 if flow.calibrated else 2 * 4 * config.num_kv_heads)
    return total


def cache_pages(job: Job, sequences: int, limit: float) -> int:
    """Pages of an engine's cache, as `Engine.sized_for` chooses them; `limit` in bytes."""
    engine, each = job.config.engine, job.pages_of_a_sequence
    if engine.kv_pages is not None:
        return engine.kv_pages
    page = job.page_size * cache_bytes_of_a_token(job.model, job.precision, job.page_size)
    # a prompt is held beside the sequences that share its pages
    return max(each, min((min(sequences, engine.max_sequences) + 1) * each, int(limit // page)))


def micro_batch_tokens(job: Job) -> float:
    """Tokens of the largest micro-batch: the limit, or one longest sequence if that is more, but no more than all."""
    longest = job.lengths.prompt + job.lengths.longest
    whole = job.completions * longest
    return min(max(job.micro_batch_limit, longest), max(whole, longest))


def _copied_keys(job: Job) -> float:
    """Keys, values and their gradients of rows that several sequences of a micro-batch see, while attention's backward
    has them apart."""
    sequences, config = job.sequences_of_a_micro_batch, job.model
    copies = sequences * (job.lengths.sequence - job.rows_of_a_sequence)
    return 4 * copies * config.num_kv_heads * config.head_dim * job.precision.learner.compute.itemsize


def _learning(job: Job) -> Item:
    tokens = micro_batch_tokens(job)
    label = f"learning: activations of {tokens:,.0f} tokens, logits, gradients of a layer"
    return label, learning_bytes(job, tokens, max(HEAD_ROWS, HEAD_ELEMENTS // job.model.vocab_size), _copied_keys(job))


def learning_bytes(job: Job, tokens: float, head_rows: int, copied: float = 0.0) -> float:
    """What the forward keeps, and the larger of what the head and one layer take in the backward. `head_rows`: rows of
    logits at a time; `copied`: keys and values of rows that several sequences see."""
    config, adapter = job.model, job.config.adapter
    hidden = job.precision.learner.compute.itemsize * config.hidden_size
    level = job.config.optimizer.activation_checkpointing
    kept = kept_bytes(config, job.precision, level, adapter) + 2 * hidden
    again = backward_bytes(config, job.precision, level, adapter)
    rows = min(tokens, head_rows)
    outside = 4 * config.vocab_size * config.hidden_size
    kept_outside = outside if adapter is None else 0
    # the head's gradient is added up over chunks of logits, so it is there twice
    head = outside + kept_outside + _LOGITS * rows * config.vocab_size + 3 * hidden * tokens
    times = 3 if job.ranks > 1 else 1  # the gradients, the message to their owners, and what comes in
    layer = times * gradient_bucket(config, adapter) + tokens * again + copied
    return max(tokens * kept + max(head, layer), times * kept_outside)


def gradient_bucket(config: ModelConfig, adapter: AdapterConfig | None = None) -> float:
    """The FP32 gradients of the largest layer, which are exchanged together."""
    layers: Counter[int] = Counter()
    for (layer, _, shape), count in masters(config, adapter).items():
        if layer is not None:
            layers[layer] += count * math.prod(shape)
    return 4.0 * max(layers.values())


def _rolling_out(job: Job) -> Item:
    """Activations of one forward, and its logits in float32, twice."""
    engine, config = job.config.engine, job.model
    rows = min(engine.max_sequences, job.completions_of_a_rank)
    wide = 2 * gate_bytes(config) + 2 * (2 * config.hidden_size + config.qkv_size)
    label = f"rolling out: activations of {engine.max_batch_tokens:,} tokens, logits"
    return label, engine.max_batch_tokens * wide + 8.0 * rows * config.vocab_size
