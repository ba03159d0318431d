"""A case: a tiny model, a unified flow, a batch and two schedules, all of them functions of one
seed."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from isobit.engine.pages import pages_needed
from isobit.engine.types import Sampling
from isobit.kernels import Scoring
from isobit.model import Experts, ModelConfig
from isobit.model.adapters.targets import NewAdapter
from isobit.model.families import FAMILIES, Family
from isobit.model.families.rope import PROPORTIONAL, Rope
from isobit.model.hub.latent import Latent
from isobit.model.hub.layer_heads import LayerHeads
from isobit.model.hub.layer_inputs import LayerInputs
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.hub.mamba import Mamba
from isobit.model.hub.multipliers import Multipliers
from isobit.precision import Precision, precision_from
from isobit.precision.flow import LINEAR_LAYERS

from .weights import KINDS

PARTS = ("linear_attention", "full_attention", "mlp", "moe")
VOCABULARIES = (64, 130, 260)
_STEPS = 40  # of an engine, about so many at most


@dataclass(frozen=True)
class Schedule:
    """How an engine is set up, in which order it gets the prompts, and with how many threads it
    computes."""

    kv_pages: int
    page_size: int
    max_batch_tokens: int
    max_sequences: int
    order: tuple[int, ...]
    threads: int
    num_speculative_tokens: int | Literal["auto"] = 0
    prefix_cache: bool = True


@dataclass(frozen=True)
class Learning:
    """How the learner gets the samples: shuffled by `seed`, in so many `parts`."""

    seed: int
    parts: int
    threads: int
    recompute: bool
    share_prompts: bool


@dataclass(frozen=True)
class Case:
    """`updates`: how often the weights are changed by a gradient step and everything is compared
    again. `adapter`: what is trained in place of the weights. `turns`: tokens that are given to
    each completion, one turn after the other, after which it goes on."""

    seed: int
    config: ModelConfig
    flow: Precision
    weights: str
    prompts: tuple[tuple[int, ...], ...]
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    schedules: tuple[Schedule, Schedule]
    learning: Learning
    updates: int
    adapter: NewAdapter | None = None
    turns: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        c = self.config
        more = "" if self.adapter is None else f", adapter of rank {self.adapter.rank}"
        return (
            f"{c.family} {c.num_layers} x {c.hidden_size}, {c.num_heads}/{c.num_kv_heads} heads of "
            f"{c.head_dim}, rope {c.rope.kind}, {self.weights} weights, {self.flow.name}{more}"
        )


def draw(seed: int) -> Case:
    """The case of this seed."""
    rng, newer = Random(seed), Random(f"newer than others {seed}")
    config = _gemma4(newer, _model(rng))
    lengths = _lengths(rng, config.max_positions)
    prompts = _prompts(rng, lengths, config.vocab_size)
    sampling = _sampling(rng)
    ids = tuple(rng.sample([*range(40), *(2**32 - 1 - i for i in range(20))], len(prompts)))
    schedules = _schedule(rng, lengths, sampling, config), _schedule(rng, lengths, sampling, config)
    learning = Learning(
        rng.randrange(2**31),
        rng.choice((1, 1, 2, 3, 7)),
        rng.choice((1, 2)),
        rng.random() < 0.3,
        rng.random() < 0.5,
    )
    flow, weights = precision_from(_flow(rng)), rng.choice(KINDS)
    family = FAMILIES[config.family]
    if weights == "cancelling" and ("input_norm" not in family.norms or family.one_part):
        # what no norm has made small would overflow, and so would products of three in a state
        weights = "heavy tails"
    # a step along a gradient would undo the cancellation
    updates = int(rng.random() < 0.4 and weights != "cancelling")
    first, second = (
        replace(
            schedule,
            num_speculative_tokens=newer.choice((0, 0, 1, 3, 7, "auto")),
            prefix_cache=newer.random() < 0.8,
        )
        for schedule in schedules
    )
    adapter = _adapter(newer) if newer.random() < 0.3 else None
    turns = tuple(
        _tokens(newer, newer.randint(0, 5), config.vocab_size)
        for _ in range(newer.choice((0, 0, 1, 2)))
    )
    return Case(
        seed,
        config,
        flow,
        weights,
        prompts,
        ids,
        sampling,
        (first, second),
        learning,
        updates,
        adapter,
        turns,
    )


def _adapter(rng: Random) -> NewAdapter:
    """Of all matrices, with a rank below and above their sides."""
    rank = rng.choice((1, 2, 3, 8, 17, 40))
    return NewAdapter(
        rank, rng.choice((0.5, 1.0, 2.0)) * rank, seed=rng.randrange(100), rslora=rng.random() < 0.3
    )


def _gemma4(rng: Random, config: ModelConfig) -> ModelConfig:
    """With what Gemma 4 alone has: heads that differ by layer, keys that are values, capped logits,
    embeddings of layers, and keys that several layers read."""
    family = FAMILIES[config.family]
    heads, cap, inputs, rope = None, None, LayerInputs(), config.rope
    slides = [config.slides(layer) for layer in range(config.num_layers)]
    if family.global_head_dim is not None:
        if rng.random() < 0.7:
            joint, dim = rng.random() < 0.5, rng.choice((4, 8, 12, 32, 40, 128))
            divisors = [n for n in (1, 2, 3) if config.num_heads % n == 0]
            kv_heads = rng.choice(divisors) if joint else config.num_kv_heads
            heads = LayerHeads(kv_heads, dim, joint)
        if rng.random() < 0.5:
            rope = Rope(10000.0, PROPORTIONAL, (("partial_rotary_factor", 0.5),))
    if family.capped_logits and rng.random() < 0.7:
        cap = rng.choice((0.5, 2.0, 6.0, 30.0))
    if family.layer_embeddings is not None and rng.random() < 0.7:
        reading = rng.randint(0, config.num_layers - 1)
        if {*slides[: config.num_layers - reading]} != {*slides}:
            reading = 0
        width = rng.choice((4, 12, 20, 64)) if family.layer_embeddings else 0
        inputs = LayerInputs(width, reading, bool(reading) and rng.random() < 0.5)
    return replace(config, global_heads=heads, logit_cap=cap, inputs=inputs, rope=rope)


def _model(rng: Random) -> ModelConfig:
    name = rng.choice(tuple(FAMILIES))
    family = FAMILIES[name]
    layers, kv_heads = rng.randint(1, 3), rng.choice((1, 1, 2, 3))
    bias = rng.random() < 0.3 and family.attention_bias
    inner = _size(rng)
    windows = _windows(rng, family, layers)
    heads = kv_heads * rng.choice((1, 2, 3, 4, 8))
    head_dim = rng.choice((2, 4, 8, 12, 16, 20, 32, 36, 64, 80, 128))
    rope = _rope(rng)
    if family.partial_rotary is not None:
        rope = Rope.of(500.0, 1.0 if head_dim % 4 else 0.5)
        if "longrope" in family.rope_kinds and rng.random() < 0.5:
            rope = _longrope(rng, head_dim // 2)
    elif rope.kind not in family.rope_kinds:
        rope = family.fresh_rope(rope.theta, 64)
    kinds = tuple(rng.choice(PARTS) for _ in range(layers)) if family.one_part else ()
    latent = None if family.latent is None else _latent(rng)
    if latent is not None:
        kv_heads, head_dim = heads, latent.head_dim
        rope = rope.of_part(latent.rotated, head_dim)
    return ModelConfig(
        family=name,
        vocab_size=rng.choice(VOCABULARIES),
        hidden_size=_size(rng),
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=rng.choice((1e-5, 1e-6)),
        rope=rope,
        qkv_bias=bias or family.qkv_bias,
        o_bias=bias and family.output_bias,
        mlp_bias=family.mlp_bias and rng.random() < 0.3,
        qk_norm=bool(family.qk_norm),
        tie_embeddings=rng.random() < 0.4 and not family.one_part,
        max_positions=rng.choice((64, 96, 128, 640)),
        eos_ids=(2,),
        experts=_experts(rng, family, layers, inner, kinds),
        windows=windows,
        unrotated=()
        if family.unrotated is None
        else tuple(n for n in range(layers) if rng.random() < 0.3),
        sliding_rope=_rope(rng) if windows and family.ropes is not None else None,
        linear=_linear(rng, layers, kinds, family.linear_attention == "by head")
        if family.linear_attention
        else None,
        kinds=kinds,
        latent=latent,
        multipliers=Multipliers(*(rng.choice((0.3, 1.0, 2.5)) for _ in range(4)))
        if family.multipliers
        else None,
        query_scalar=None if family.query_scalar is None else rng.choice((4, 24, 64, 256)),
    )


def _linear(rng: Random, layers: int, kinds: tuple[str, ...], by_head: bool) -> LinearAttention:
    """In some of the layers, with heads of any size; Mamba-2's in those of its kind."""
    where = tuple(layer for layer in range(layers) if rng.random() < 0.7)
    heads = rng.choice((1, 2, 3))
    sizes = rng.choice((4, 12, 16, 20, 32, 36, 128)), rng.choice((4, 12, 16, 20, 32, 36, 128))
    given = heads, heads * rng.choice((1, 2)), *sizes, rng.choice((2, 3, 4))
    if not kinds:
        return LinearAttention(where, *given, by_head=by_head)
    where = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    return Mamba(where, *given, least_step=rng.choice((0.0, 0.001, 0.5)))


def _latent(rng: Random) -> Latent:
    """Heads of any size, values narrower than keys or as wide."""
    plain, rotated = rng.choice((2, 6, 12, 32, 48)), rng.choice((2, 4, 8, 16, 32))
    value = rng.choice((2, plain, plain + rotated))
    return Latent(_size(rng), plain, rotated, value, rng.choice((None, _size(rng))))


def _windows(rng: Random, family: Family, layers: int) -> tuple[int | None, ...]:
    """Of one token up to more than most sequences have, in some of the layers."""
    if family.windows is None or rng.random() < 0.2:
        return ()
    return tuple(rng.choice((None, 1, 2, 3, 7, 16, 17, 33, 70)) for _ in range(layers))


def _size(rng: Random) -> int:
    """Of a hidden dimension: below, at and above the blocks of 128, mostly no multiple of
    anything."""
    return rng.choice((16, 30, 36, 48, 64, 96, 128, 130, 144, 160, 200, 256, 258, 272, 330, 400))


def _experts(
    rng: Random, family: Family, layers: int, inner: int, kinds: tuple[str, ...]
) -> Experts | None:
    count = rng.choice((2, 3, 5, 8, 11))
    chosen = rng.randint(1, min(count, 4))
    if family.mixtures is None or not family.mixtures.own_keys:
        if family.mixtures is None:
            return None
        fixed = family.mixtures.scoring
        return Experts(count, chosen, inner, scoring=fixed and Scoring(*fixed))
    if family.mixtures.switch is not None:  # a model may have none; its MLP is as wide as any
        size = _size(rng) // 2
        return Experts(count, chosen, size, shared=inner) if rng.random() < 0.5 else None
    size, shared = _size(rng) // 2, rng.choice((24, 64, 130)) if family.mixtures.shared else 0
    if not family.mixtures.dense:
        return Experts(count, chosen, size, shared=shared)
    dense = tuple(layer for layer in range(1, layers) if rng.random() < 0.2)
    if kinds:
        dense = tuple(layer for layer, kind in enumerate(kinds) if kind != "moe")
    normalize = rng.random() < 0.5
    if family.mixtures.scoring is None:
        return Experts(count, chosen, size, normalize, dense, shared)
    groups, per_group = rng.choice(((1, 5), (2, 4), (4, 2)))
    best = rng.randint(1, groups)
    chosen = min(chosen, best * per_group)
    scoring = Scoring(groups, best, rng.choice((1.0, 2.5)))
    beside, latent = size, 0
    if kinds:
        beside, latent = shared, rng.choice((0, 0, _size(rng) // 2))
    count = groups * per_group
    return Experts(count, chosen, size, normalize, dense, beside, scoring, latent)


def _rope(rng: Random) -> Rope:
    theta = rng.choice((100.0, 500.0, 1e4, 1e6))
    scaled: dict[str, dict[str, float]] = {
        "default": {},
        "linear": {"factor": rng.choice((2.0, 2.5))},
        "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 32},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    }
    kind = rng.choice(("default", "default", *scaled))
    return Rope(theta, kind, tuple(sorted(scaled[kind].items())))


def _longrope(rng: Random, count: int) -> Rope:
    """Short or long by the models' context, which is 64."""
    short, long = (tuple(1 + 3 * rng.random() for _ in range(count)) for _ in range(2))
    given = {"short_factor": short, "long_factor": long}
    given |= {"original_max_position_embeddings": rng.choice((32, 64))}
    return Rope(500.0, "longrope", tuple(sorted(given.items())))


def _flow(rng: Random) -> dict[str, Any]:
    """A unified flow: a preset, often with some of its options changed for both uses alike."""
    preset = rng.choice(
        ("bf16", "float32", "fp8", "fp8", "fp8-unified", "fp8-unified", "mxfp8", "nvfp4")
    )
    choices: dict[str, tuple[Any, ...]] = {
        "query": ("bf16", "e4m3"),
        "probabilities": ("bf16", "e4m3"),
    }
    if preset not in ("bf16", "float32"):
        choices |= {
            "bf16_first_layers": (0, 1),
            "bf16_last_layers": (0, 1),
            "bf16_layers": (rng.sample(LINEAR_LAYERS, rng.randint(1, 3)),),
        }
    if preset in ("fp8", "fp8-unified"):
        choices |= {
            "weight_scale": ("fp32", "ue8m0"),
            "activation_scale": ("fp32", "ue8m0"),
            "weight_granularity": ("128x128", "row", "tensor"),
            "activation_granularity": ("1x128", "row"),
        }
    if preset in ("fp8", "fp8-unified", "mxfp8"):
        choices |= {
            "dgrad": ("fp8", "bf16"),
            "wgrad": ("fp8", "bf16"),
            "gradient_scale": ("fp32", "ue8m0"),
            "gradient_format": ("e4m3", "e5m2"),
        }
    often = rng.choice((0.0, 0.2, 0.5))
    flow = {"preset": preset} | {
        key: rng.choice(values) for key, values in choices.items() if rng.random() < often
    }
    if rng.random() < 0.5:
        flow["kv_cache"] = rng.choice(
            ("bf16", "e4m3", "int8", "e4m3-calibrated", "e4m3-calibrated")
        )
    if (
        flow.get("kv_cache") == "e4m3-calibrated"
    ):  # 1.75 / 448 is 2^-8: values of few bits, which lie on ties of BF16
        flow |= {
            "kv_margin": rng.choice((1.0, 1.05, 1.75, 1.75)),
            "kv_percentile": rng.choice((99.9, 100.0)),
        }
    return flow


def _lengths(rng: Random, positions: int) -> list[int]:
    longest = min(positions - 24, rng.choice((8, 40, 40, 90, 600)))
    lengths = [rng.randint(1, min(longest, 60)) for _ in range(rng.randint(1, 5))]
    return [longest, *lengths] if longest > 60 else lengths


def _prompts(rng: Random, lengths: list[int], vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """Random tokens, one token repeated, a short period, or the beginning of the longest prompt."""
    whole = _tokens(rng, max(lengths), vocabulary)
    prompts = []
    for length in lengths:
        kind = rng.choice(("random", "repeated", "period", "shared"))
        period = _tokens(
            rng, {"repeated": 1, "period": rng.randint(2, 5)}.get(kind, length), vocabulary
        )
        shared = rng.randint(0, length)
        repeated = (period * length)[:length]
        prompts.append((*whole[:shared], *repeated[shared:]) if kind == "shared" else repeated)
    return tuple(prompts)


def _tokens(rng: Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, vocabulary) for _ in range(count))


def _sampling(rng: Random) -> Sampling:
    plain = Sampling(
        n=rng.randint(1, 5),
        max_new_tokens=rng.choice((1, 2, 7, 13, 20)),
        temperature=rng.choice((1.0, 1.0, 1.0, 0.7, 1.3, 0.05, 0)),
        seed=rng.randrange(2**63),
        stop=rng.choice(((), (), (), ("a",), ("e", "xy"))),
        ignore_eos=rng.random() < 0.3,
    )
    if rng.random() < 0.2:
        plain = replace(plain, repetition_penalty=rng.choice((0.5, 1.1, 1.3, 10.0)))
    if rng.random() < 0.8:
        return plain
    return replace(
        plain, top_k=rng.choice((0, 3)), top_p=rng.choice((1.0, 0.8)), min_p=rng.choice((0.0, 0.05))
    )


def _schedule(rng: Random, lengths: list[int], sampling: Sampling, config: ModelConfig) -> Schedule:
    """Mostly a tight one: few pages, so that sequences are preempted, and steps that cut prompts
    into chunks."""
    page_size = rng.choice((1, 2, 3, 4, 5, 8, 16, 32))
    limits = [min(sampling.max_new_tokens, config.max_positions - length) for length in lengths]
    needed = [pages_needed(length, limit, page_size) for length, limit in zip(lengths, limits)]
    everything = sum(needed) * sampling.n + len(needed)
    sequences = len(lengths) * sampling.n
    least = 1 + (sum(lengths) + sampling.n * sum(limits)) // _STEPS
    return Schedule(
        kv_pages=rng.choice((max(needed), max(needed) + rng.randint(0, max(needed)), everything)),
        page_size=page_size,
        max_batch_tokens=rng.choice((least, least + rng.randint(0, 30), 2048)),
        max_sequences=rng.choice(
            (1 + sequences // 4, rng.randint(1 + sequences // 3, sequences + 1), 512)
        ),
        order=tuple(rng.sample(range(len(lengths)), len(lengths))),
        threads=rng.choice((1, 2)),
    )
