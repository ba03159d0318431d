"""Bytes that the learner's forward keeps of a token for its backward, by preset, and of what they
consist.

    python -m benchmarks saved_bytes

Counted from the recorded graph, not timed: every tensor that a node saved, each storage once,
without weights; the difference of two lengths, so that what does not grow with tokens is left out.
A test holds the sum to all that is alive after a forward (`tests/test_saved_bytes.py`). Models of
two layers in Qwen3's form, with half as many key heads as query heads.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Claim, Result
from benchmarks.models import tokenizer
from isobit import Model
from isobit.kernels import Layout, tensors_of
from isobit.model import ModelConfig
from isobit.model.forward.recompute import Recompute

SIZES = {512: (1536, 8, 64), 2048: (6144, 16, 128)}
"""Hidden size to intermediate size, query heads and head dimension."""
PRESETS = ("bf16", "fp8", "fp8-unified", "fp8-e2e", "mxfp8")
LEVELS: tuple[Recompute, ...] = (False, "mlp")
BEFORE = {512: 18472, 2048: 73800}
"""What `bf16` kept when nothing was made again, counted by this benchmark."""
_SHORT, _LONG = 128, 256
_LAYERS = 2


def run(rounds: int) -> Result:
    result = Result("saved_bytes")
    for hidden in SIZES:
        for level in LEVELS:
            found = {preset: _of_a_layer(hidden, preset, level) for preset in PRESETS}
            totals = {preset: sum(parts.values()) for preset, parts in found.items()}
            case = f"hidden {hidden}" + (f", activation_checkpointing: {level}" if level else "")
            for preset, parts in found.items():
                result.parts[f"{case}, {preset}"] = dict(parts)
                what = f"{case}: {preset}'s {totals[preset]:,.0f} bytes a token and layer over"
                ratio = totals[preset] / BEFORE[hidden]
                result.claims.append(
                    Claim(f"{what} {BEFORE[hidden]:,} of bf16 in 0.1.0", ratio, "<=", 0.55)
                )
            ratio = max(totals.values()) / totals["bf16"]
            result.claims.append(
                Claim(f"{case}: the most of a preset over bf16's", ratio, "<=", 1.0)
            )
    return result


def _of_a_layer(hidden: int, preset: str, recompute: Recompute) -> Counter[str]:
    """Bytes of a token in one layer, by what saves them."""
    inner, heads, dim = SIZES[hidden]
    known = tokenizer()
    config = ModelConfig(
        family="qwen3",
        vocab_size=known.vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=_LAYERS,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=dim,
        qk_norm=True,
        tie_embeddings=True,
        max_positions=_LONG,
        eos_ids=known.eos_ids,
    )
    return in_layers(bytes_of_a_token(Model.init(config, known, preset), recompute), _LAYERS)


def bytes_of_a_token(model: Model, recompute: Recompute = False) -> Counter[str]:
    """Bytes by what saves them, of a token of all layers, and outside of them."""
    short, long = (saved(model, tokens, recompute) for tokens in (_SHORT, _LONG))
    return Counter({label: (long[label] - short[label]) / (_LONG - _SHORT) for label in long})  # type: ignore[misc]


def in_layers(found: Counter[str], layers: int) -> Counter[str]:
    """Of one of the `layers`: without the embedding and the last norm."""
    return Counter(
        {label: size / layers for label, size in found.items() if not label.startswith("outside")}
    )  # type: ignore[misc]


def saved(model: Model, tokens: int, recompute: Recompute = False) -> Counter[str]:
    """Bytes that are kept of one sequence of so many tokens, by what saves them."""
    ids = torch.arange(tokens) % model.config.vocab_size
    with torch.enable_grad():
        hidden = model.transformer.hidden(ids, Layout.packed([tokens]), recompute=recompute)
    known = {_key(tensor) for tensor in _weights(model)}
    found = Counter[str]()
    assert hidden.grad_fn is not None
    for node in _nodes(hidden.grad_fn):
        for label, tensor in _kept(node):
            if _key(tensor) not in known:
                known.add(_key(tensor))
                found[label] += tensor.untyped_storage().nbytes()
    return found


def _nodes(last: Any) -> Iterator[Any]:
    """All nodes of the graph, each once, from the last to the first."""
    seen, waiting = {last}, [last]
    while waiting:
        node = waiting.pop(0)
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)


def _kept(node: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a node keeps, with its name, the matrix that it multiplies, and their
    columns and type."""
    name = type(node).__name__.removesuffix("Backward").lstrip("_")
    weight = getattr(node, "weight", None)
    owner = name if weight is None else f"{name} of {weight.name.rpartition('.')[2]}"
    if name in ("Embedding", "RMSNorm"):
        owner = f"outside: {owner}"
    tensors = [t for t in getattr(node, "saved_tensors", ()) if t is not None]
    for tensor in tensors:
        yield f"{owner}: {tensor[0].numel() if tensor.ndim else 1} x {_type(tensor)}", tensor


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _weights(model: Model) -> Iterator[Tensor]:
    transformer = model.transformer
    yield from model.parameters()
    yield from transformer.masters.leaves.values()
    for use in ("learner", "rollout"):
        for _, operand, _ in transformer._working[use].tensors():
            yield from tensors_of(operand)
