"""What an 8-bit cache of keys and values costs, by how its numbers are scaled: at equal bytes,
which is the best?

A model runs in float32, and nothing but its stored keys and values is coded and decoded, so all
that is seen is the cache's. The divergence is KL(float32 || coded) of the next token, over the
whole vocabulary, the mean over tokens that the float32 model sampled itself; two independent halves
of the completions show how far it can be trusted. Codings that are calibrated (by channel, shifted)
take their constants from other completions.

Three of the codings are formats of isobit's own cache (`OWN`). With `--own` these are measured as a
run has them, its operators writing and reading codes, beside the same coding here; and whole flows
(`FLOWS`), in which weights and activations have 8 bits too.

`python -m benchmarks.experiments.kv_cache MODEL --prompt TEXT --out FILE` adds a model to a file of
results; docs/experiments/kv-cache.md shows what came out. Left out: speed, and formats of fewer
bits.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.command import command, of_a_model, write
from isobit import Engine, Model, Sampling
from isobit.kernels import Heads, KVStore, Layout, Ops
from isobit.kernels.watching import Watching
from isobit.precision import E4M3

_LARGEST = E4M3.max
_TINY = 1e-12


def e4m3(x: Tensor, largest: Tensor) -> Tensor:
    """x [T, KV, D] coded and decoded, with the scale that makes `largest` the format's largest
    number."""
    scale = largest.clamp(min=_TINY) / _LARGEST
    return (x / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float() * scale


def int8(x: Tensor, largest: Tensor) -> Tensor:
    """The same in 255 equal steps."""
    scale = largest.clamp(min=_TINY) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def by_row(x: Tensor) -> Tensor:
    """The largest magnitude of each token and head, [T, KV, 1]."""
    return x.abs().amax(-1, keepdim=True)


def power_of_two(x: Tensor) -> Tensor:
    """Of each token and head, such that the scale is a power of two and nothing is clamped."""
    return torch.exp2(torch.ceil(torch.log2(by_row(x).clamp(min=_TINY) / _LARGEST))) * _LARGEST


def by_token(x: Tensor) -> Tensor:
    """Of each token, all heads together."""
    return x.abs().amax((-1, -2), keepdim=True)


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix of +-1 / sqrt(size), its own inverse; `size` a power of two."""
    found = torch.ones(1, 1)
    while found.shape[0] < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / size**0.5


@dataclass(frozen=True)
class Seen:
    """Of one layer, from completions that are not measured: means and largest magnitudes by head
    and channel, [KV, D], of keys before and after the rotation and of values; and the largest
    magnitude of all keys, and of all values."""

    key_mean: Tensor
    plain_key_mean: Tensor
    key_largest: Tensor
    plain_key_largest: Tensor
    value_largest: Tensor


Turn = Callable[[Tensor, bool], Tensor]
"""Rotates keys by their positions, or back."""
Code = Callable[[Tensor, Seen, Turn], Tensor]


@dataclass(frozen=True)
class Scheme:
    """How keys and values are coded, and the bytes of one token and head, both together, for head
    dimension D."""

    key: Code
    value: Code
    bytes: Callable[[int], float]


def _rotated(x: Tensor) -> Tensor:
    return x @ hadamard(x.shape[-1])


def _row(x: Tensor, seen: Seen, turn: Turn) -> Tensor:
    return e4m3(x, by_row(x))


def _two_bytes_wide(dim: int) -> float:
    return 2.0 * dim


SCHEMES: dict[str, Scheme] = {
    "E4M3, token and head, powers of two": Scheme(
        lambda x, *_: e4m3(x, power_of_two(x)), lambda x, *_: e4m3(x, power_of_two(x)),
        lambda d: 2.0 * (d + 1)
    ),
    "E4M3, token and head": Scheme(_row, _row, lambda d: 2.0 * (d + 4)),
    "the same, keys alone": Scheme(_row, lambda x, *_: x, lambda d: d + 4 + 4.0 * d),
    "the same, values alone": Scheme(lambda x, *_: x, _row, lambda d: d + 4 + 4.0 * d),
    "E4M3, token": Scheme(
        lambda x, *_: e4m3(x, by_token(x)), lambda x, *_: e4m3(x, by_token(x)), lambda d: 2.0 * d
    ),
    "E4M3, one scale, calibrated": Scheme(
        lambda x, seen, _: e4m3(x, seen.key_largest.amax()), lambda x, seen,
        _: e4m3(x, seen.value_largest.amax()),
        _two_bytes_wide,
    ),
    "E4M3, channel, calibrated": Scheme(
        lambda x, seen, _: e4m3(x, seen.key_largest), lambda x, seen,
        _: e4m3(x, seen.value_largest), _two_bytes_wide
    ),
    "E4M3, keys by channel before the rotation, calibrated": Scheme(
        lambda x, seen, turn: turn(e4m3(turn(x, True), seen.plain_key_largest), False), _row,
        lambda d: 2.0 * d + 4
    ),
    "E4M3, token and head, keys before the rotation": Scheme(
        lambda x, seen, turn: turn(_row(turn(x, True), seen, turn), False), _row,
        lambda d: 2.0 * (d + 4)
    ),
    "E4M3, token and head, keys through Hadamard's matrix": Scheme(
        lambda x, seen, turn: _rotated(_row(_rotated(x), seen, turn)), _row, lambda d: 2.0 * (d + 4)
    ),
    "E4M3, token and head, keys without their mean, calibrated": Scheme(
        lambda x, seen, turn: _row(x - seen.key_mean, seen, turn) + seen.key_mean, _row,
        lambda d: 2.0 * (d + 4)
    ),
    "E4M3, token and head, keys without their mean before the rotation, calibrated": Scheme(
        lambda x, seen, turn: turn(
            _row(turn(x, True) - seen.plain_key_mean, seen, turn) + seen.plain_key_mean, False
        ),
        _row, lambda d: 2.0 * (d + 4),
    ),
    "INT8, token and head": Scheme(
        lambda x, *_: int8(x, by_row(x)), lambda x, *_: int8(x, by_row(x)), lambda d: 2.0 * (d + 4)
    ),
    "INT8, token and head, through Hadamard's matrix": Scheme(
        lambda x, *_: _rotated(int8(_rotated(x), by_row(_rotated(x)))),
        lambda x, *_: _rotated(int8(_rotated(x), by_row(_rotated(x)))), lambda d: 2.0 * (d + 4),
    ),
}  # fmt: skip


OWN = {
    "E4M3, token and head, powers of two": "float32[kv_cache=e4m3, kv_scale=ue8m0]",
    "E4M3, token and head": "float32[kv_cache=e4m3, kv_scale=fp32]",
    "INT8, token and head": "float32[kv_cache=int8]",
}
"""Schemes that isobit's cache has, and the precision that has nothing else in 8 bits."""
FLOWS = (
    "bf16",
    "fp8[kv_cache=bf16]",
    "fp8[kv_cache=e4m3]",
    "fp8[kv_cache=e4m3, kv_scale=fp32]",
    "fp8",
)


class _Coding(Watching):
    """Operators whose attention inputs pass through `change`."""

    def __init__(
        self, ops: Ops, change: Callable[[Tensor, Tensor, Turn], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(ops)
        self._change = change

    def attention_inputs(
        self, qkv: Tensor, heads: Heads, store: KVStore, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._ops.attention_inputs(qkv, heads, store, layout)

        def turn(x: Tensor, back: bool) -> Tensor:
            return self._ops.rotary(x.contiguous(), *heads.tables, layout.positions, inverse=back)

        k, v = self._change(k, v, turn)
        self._ops.kv_write(store, k.contiguous(), v.contiguous(), layout)
        return q, k, v


@contextmanager
def _changed(
    model: Model, change: Callable[[int, Tensor, Tensor, Turn], tuple[Tensor, Tensor]]
) -> Iterator[None]:
    def watch(ops: Ops, layer: int | None) -> Ops:
        if layer is None:
            return ops
        return _Coding(ops, lambda k, v, turn: change(layer, k, v, turn))  # type: ignore[return-value]

    with model.transformer.watched(watch):
        yield


@torch.no_grad()
def _logprobs(model: Model, sequences: Sequence[Sequence[int]], prompts: Sequence[int]) -> Tensor:
    """Of every token of the vocabulary, [completion tokens, V] float64."""
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    hidden = model.transformer.hidden(
        tokens, Layout.packed([len(sequence) for sequence in sequences])
    )
    rows, start = [], 0
    for sequence, prompt in zip(sequences, prompts):
        rows += range(start + prompt - 1, start + len(sequence) - 1)
        start += len(sequence)
    logits = model.ops.product(
        hidden[rows], model.transformer.head_weight("learner"), None, torch.float32
    )
    return torch.log_softmax(logits.double(), -1)


def observe(
    model: Model, sequences: Sequence[Sequence[int]], prompts: Sequence[int]
) -> dict[int, Seen]:
    """What calibrated codings know, by layer."""
    kept: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def look(layer: int, k: Tensor, v: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        kept.setdefault(layer, []).append((k, turn(k, True), v))
        return k, v

    with _changed(model, look):
        _logprobs(model, sequences, prompts)
    found = {}
    for layer, parts in kept.items():
        keys, plain, values = (torch.cat(each) for each in zip(*parts))
        found[layer] = Seen(
            keys.mean(0), plain.mean(0), keys.abs().amax(0), plain.abs().amax(0),
            values.abs().amax(0)
        )  # fmt: skip
    return found


def divergence(
    model: Model,
    scheme: Scheme,
    seen: dict[int, Seen],
    sequences: Sequence[Sequence[int]],
    prompts: Sequence[int],
) -> Tensor:
    """KL(float32 || coded) of every completion token, float64."""
    wanted = _logprobs(model, sequences, prompts)

    def code(layer: int, k: Tensor, v: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        return scheme.key(k, seen[layer], turn), scheme.value(v, seen[layer], turn)

    with _changed(model, code):
        found = _logprobs(model, sequences, prompts)
    return (wanted.exp() * (wanted - found)).sum(-1)


def own_divergence(
    model: Model, precision: str, sequences: Sequence[Sequence[int]], prompts: Sequence[int]
) -> Tensor:
    """KL(float32 || precision) of every completion token, float64: the same weights under another
    flow."""
    wanted = _logprobs(model, sequences, prompts)
    return (wanted.exp() * (wanted - _logprobs(model.under(precision), sequences, prompts))).sum(-1)


def sampled(
    path: Path, prompts: Sequence[str], new_tokens: int, seed: int
) -> tuple[Model, list[list[int]], list[int], list[slice]]:
    """(the model in float32, sequences, lengths of their prompts, three parts of them) of
    completions of its own."""
    model = Model.load(path, "float32")
    engine = Engine.sized_for(model, prompts, len(prompts), new_tokens)
    groups = engine.generate(list(prompts), Sampling(max_new_tokens=new_tokens, seed=seed))
    completions = [completion for group in groups for completion in group]
    sequences = [c.prompt_token_ids + c.token_ids for c in completions]
    lengths = [len(c.prompt_token_ids) for c in completions]
    third = len(sequences) // 3
    return (
        model,
        sequences,
        lengths,
        [slice(0, third), slice(third, 2 * third), slice(2 * third, 3 * third)],
    )


def measure_own(
    path: Path, prompts: Sequence[str], new_tokens: int, seed: int = 0
) -> dict[str, Any]:
    """The formats of isobit's cache and whole flows, on the completions that `measure` measures; of
    the former the same codings simulated."""
    model, sequences, lengths, parts = sampled(path, prompts, new_tokens, seed)
    nothing: dict[int, Any] = dict.fromkeys(
        range(model.config.num_layers)
    )  # is seen by these codings

    def mean(found: Callable[[Sequence[Sequence[int]], Sequence[int]], Tensor]) -> float:
        return float(
            torch.cat([found(sequences[part], lengths[part]) for part in parts[1:]]).mean()
        )

    rows = [
        {
            "scheme": name, "precision": precision,
            "kl": mean(partial(own_divergence, model, precision)),
            "simulated": mean(partial(divergence, model, SCHEMES[name], nothing)),
        }
        for name, precision in OWN.items()
    ]  # fmt: skip
    flows = {precision: mean(partial(own_divergence, model, precision)) for precision in FLOWS}
    return {
        "model": path.name,
        "prompts": list(dict.fromkeys(prompts)),
        "rows": rows,
        "flows": flows,
    }


def measure(path: Path, prompts: Sequence[str], new_tokens: int, seed: int = 0) -> dict[str, Any]:
    """Every scheme on completions of the model's own; a third of them only calibrates."""
    model, sequences, lengths, parts = sampled(path, prompts, new_tokens, seed)
    seen = observe(model, sequences[parts[0]], lengths[parts[0]])
    dim = model.config.head_dim
    rows = []
    for name, scheme in SCHEMES.items():
        halves = [
            divergence(model, scheme, seen, sequences[part], lengths[part]) for part in parts[1:]
        ]
        both = torch.cat(halves)
        rows.append({
            "scheme": name, "bytes": scheme.bytes(dim), "kl": float(both.mean()),
            "halves": [float(half.mean()) for half in halves], "p99": float(both.quantile(0.99)),
            "tokens": len(both),
        })  # fmt: skip
    return {
        "model": path.name,
        "head_dim": dim,
        "kv_heads": model.config.num_kv_heads,
        "rows": rows,
    }


def table(models: Sequence[dict[str, Any]]) -> str:
    """A line for each scheme in Markdown: bytes of a head and token, and the divergence, model by
    model."""
    head = " | ".join(f"{m['model']}: bytes | KL | of the halves | 99th percentile" for m in models)
    lines = [f"| keys and values | {head} |", "|---" * (1 + 4 * len(models)) + "|"]
    for name in SCHEMES:
        cells = [name]
        for model in models:
            row = next(row for row in model["rows"] if row["scheme"] == name)
            halves = ", ".join(f"{half:.1e}" for half in row["halves"])
            cells += [f"{row['bytes']:.0f}", f"{row['kl']:.1e}", halves, f"{row['p99']:.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).replace("e-0", "e-")


def draw(models: Sequence[dict[str, Any]], out: Path) -> None:
    """A bar for each scheme and model."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 5.2), constrained_layout=True)
    names = list(reversed(SCHEMES))
    for number, model in enumerate(models):
        found = {row["scheme"]: row["kl"] for row in model["rows"]}
        places = [place + 0.38 * (0.5 - number) for place in range(len(names))]
        label = f"{model['model']}, heads of {model['head_dim']}"
        axis.barh(
            places,
            [found[name] for name in names],
            height=0.36,
            label=label,
            color=("#3b7dd8", "#e0903a")[number],
        )
    axis.set_xscale("log")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlabel(
        "KL(float32 || coded cache) of the next token, mean; less is better", fontsize=9
    )
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = command(__file__, __doc__, "JSON; a model of this name is replaced")
    of_a_model(parser)
    parser.add_argument(
        "--count", type=int, default=150, help="completions; a third of them only calibrates"
    )
    parser.add_argument("--new-tokens", type=int, default=200, help="at most, of each")
    parser.add_argument("--name", help="in tables; default: the directory's")
    parser.add_argument(
        "--own", action="store_true", help="measure the formats of isobit's own cache"
    )
    arguments = parser.parse_args()
    prompts = [arguments.prompt[i % len(arguments.prompt)] for i in range(arguments.count)]
    if arguments.own:
        own = measure_own(arguments.model, prompts, arguments.new_tokens)
        write(arguments.out, own)
        print(json.dumps(own, indent=1))
        return
    found = measure(arguments.model, prompts, arguments.new_tokens) | {
        "name": arguments.name or arguments.model.name
    }
    models = json.loads(arguments.out.read_text()) if arguments.out.is_file() else []
    found["model"] = found.pop("name")
    models = [model for model in models if model["model"] != found["model"]] + [found]
    write(arguments.out, models)
    print(table(models))


if __name__ == "__main__":
    main()
