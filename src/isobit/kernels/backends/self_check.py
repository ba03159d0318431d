"""Whether the kernels keep on this GPU what they promise, before a run counts on it.

Nothing but a run on a GPU can show that its matrix instructions give a row the same bits alone and
among others. So the first start on a machine computes products, attention, linear attention by both
of its rules, the output head, norms and gates: rows alone, a few of them and all must agree in every
bit, and be the reference's within a bound; and the rounding of BF16 masters, in every bit. What is
compared is float32, with the logarithms of attention's sums: rounded to BF16, another order of a sum shows in
one number of hundreds (`tests/kernels/triton/test_emulated_cards.py`). Most of the time goes into
compiling. A pass is remembered for the GPU, its driver, the versions of PyTorch and Triton, and
what the kernels compute. Left out: whole models (`python -m benchmarks.gpu`), the backward, and
several GPUs of which one is broken.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import isobit
from isobit.kernels.attention.triton import forward as attention
from isobit.kernels.backends.reference import ReferenceOps
from isobit.kernels.cache import CacheUnusable, cache_directory, unless_passed
from isobit.kernels.gpu import versions
from isobit.kernels.layout import Layout
from isobit.kernels.matrices import Operand, values
from isobit.kernels.ops import DeltaHeads, Ops
from isobit.kernels.optim.definition import round_stochastically
from isobit.kernels.product.triton.plan import put_weights_first
from isobit.kernels.stores import KVStore, StateStore
from isobit.precision import BF16, E4M3, INT8, QTensor, QuantSpec
from isobit.run.source import code_digest

if TYPE_CHECKING:
    from isobit.kernels.backends.triton import TritonOps

_BLOCK, _ROW = QuantSpec(E4M3, "128x128"), QuantSpec(E4M3, "1x128")
_CACHES = {"BF16": None, "FP8": QuantSpec(E4M3, "row"), "INT8": QuantSpec(INT8, "row", "fp32")}
_ROWS = 80  # more than one tile, and not whole ones
_PARTS = ((0, 1), (79, 80), (3, 20), (10, 60), (5, 72))  # tiles of 16, 32, 64 rows, and the large
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BOUND = 2.0**-7  # of the largest result: BF16 rounds by half of this at most
EXCHANGED, ONE_SIDE = "operands exchanged", "rows on one side"
_EXCHANGING = ("attention over keys", "FP8 product")
Found = tuple[str, bool]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the check. `products`: outputs and inputs; the second sums in chunks, the third
    has the tiles of many programs. `length` of a sequence: two splits of keys. `width` of normed
    and gated rows. `states`: rows of linear attention, its heads of keys and of values, their
    dimension."""

    products: tuple[tuple[int, int], ...] = ((192, 640), (64, 8192), (16896, 256))
    length: int = 600
    width: int = 384
    states: tuple[int, int, int, int] = (_ROWS, 2, 4, 128)


FULL = Sizes()
SMALL = Sizes(((64, 160),), 70, 96, (9, 1, 2, 8))
"""Without sums in chunks and splits of keys: for Triton's interpreter, which they take a minute."""


def failures(ops: "TritonOps", fp8: bool = True, sizes: Sizes = FULL) -> list[str]:
    """Check the operators on this GPU, and return the failures, a phrase each."""
    kinds = ("BF16", "FP8", "INT8") if fp8 else ("BF16", "INT8")
    return [what for kind in kinds for what, holds in _all(ops, kind, sizes) if not holds]


def remembered(
    ops: "TritonOps",
    fp8: bool = True,
    tried: dict[str, list[str]] | None = None,
    sizes: Sizes = FULL,
) -> list[str]:
    """Return `failures`, unless there were none before on the same GPU with the same software.

    Decoding exchanges the operands of the learner's matrix instructions, in attention and in FP8
    products, which no specification says to keep bits. Where these alone fail, they are asked again
    with all rows on one side, and compute so if that holds. `tried` receives what failed either way,
    `EXCHANGED` and `ONE_SIDE`.
    """
    tried = {} if tried is None else tried
    try:
        place = cache_directory("gpu")
    except CacheUnusable:
        place = None
    one_side = f"{_identity()}.one-side.passed"
    if place is None or not (place / one_side).exists():
        found = tried[EXCHANGED] = _once(ops, fp8, place, f"{_identity()}.passed", sizes)
        if not found or not all(what.startswith(_EXCHANGING) for what in found):
            return found
    attention.put_rows_first()
    put_weights_first()
    found = tried[ONE_SIDE] = _once(ops, fp8, place, one_side, sizes)
    return found


def side() -> str:
    """Return how this process multiplies."""
    return EXCHANGED if attention.keys_first() else ONE_SIDE


def _once(ops: "TritonOps", fp8: bool, place: Path | None, name: str, sizes: Sizes) -> list[str]:
    if place is None:
        return failures(ops, fp8, sizes)
    return unless_passed(place / name, lambda: failures(ops, fp8, sizes), [])


def _identity() -> str:
    digest = hashlib.sha256(repr(sorted(versions().items())).encode())
    with suppress(OSError):
        digest.update(Path("/proc/driver/nvidia/version").read_bytes())
    for room in ("kernels", "precision"):
        digest.update(code_digest(Path(isobit.__file__).parent / room).encode())
    return digest.hexdigest()[:16]


def _all(ops: "TritonOps", kind: str, sizes: Sizes) -> Iterator[Found]:
    yield from _attention(ops, kind, sizes.length)
    if kind == "INT8":  # of the cache alone
        return
    for outputs, inputs in sizes.products:
        yield from _product(ops, kind, outputs, inputs)
    if kind == "FP8":
        yield from _quantized(ops, sizes.width)
    else:
        yield from _head(ops)
        yield from _rounded(ops)
        yield from _recurrent(ops, sizes.states, "delta rule")
        yield from _recurrent(ops, sizes.states, "Mamba-2")


def _random(ops: Ops, seed: int, *shape: int) -> Tensor:
    """Return BF16 of widely varying magnitudes: sums of equal ones would hide an order. The user's
    generators stay as they are."""
    signed, exponents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))
    return (signed * torch.exp(exponents)).bfloat16().to(ops.device)


def _same(found: Tensor, wanted: Tensor) -> bool:
    """Return whether every bit is: a zero's sign too."""
    bits = (x.contiguous().view(_WORDS[x.element_size()]) for x in (found, wanted))
    return found.dtype == wanted.dtype and torch.equal(*bits)


def _alone(
    what: str, call: Callable[[int, int], tuple[Tensor, ...]], whole: tuple[Tensor, ...]
) -> Iterator[Found]:
    """Parts of the rows against all of them."""
    for lo, hi in _PARTS:
        same = all(_same(part, among[lo:hi]) for part, among in zip(call(lo, hi), whole))
        yield f"{what}: rows {lo} to {hi} have other bits than among {_ROWS}", same


def _near(what: str, found: Tensor, wanted: Tensor) -> Found:
    error = (found.cpu().double() - wanted.double()).abs().max() / wanted.double().abs().max()
    return f"{what}: off by {float(error):.1e} of the largest result", bool(error <= _BOUND)


def _product(ops: Ops, kind: str, outputs: int, inputs: int) -> Iterator[Found]:
    x, w = _random(ops, 0, _ROWS, inputs), _random(ops, 1, outputs, inputs)
    a: Operand = ops.quantize(x, _ROW) if kind == "FP8" else x
    b: Operand = ops.quantize(w, _BLOCK) if kind == "FP8" else w

    def rows(lo: int, hi: int) -> tuple[Tensor]:
        return (ops.product(_rows(a, lo, hi), b, None, torch.float32),)

    what, whole = f"{kind} product of {outputs} outputs, {inputs} inputs", rows(0, _ROWS)
    yield from _alone(what, rows, whole)
    yield _near(what, whole[0], values(a).cpu().double() @ values(b).cpu().double().t())


def _rows(x: Operand, lo: int, hi: int) -> Operand:
    return QTensor(x.data[lo:hi], x.scale[lo:hi], x.spec) if isinstance(x, QTensor) else x[lo:hi]


def _attention(ops: "TritonOps", kind: str, length: int) -> Iterator[Found]:
    """Yield a sequence at once, some of its rows as if decoded one by one, and its last ones in
    chunks: tiles of 16, 32, 64 and 128 rows, which stand on either side of the matrix instruction.
    Results before they are rounded, and logarithms of sums."""
    heads, kv_heads, dim = 2, 1, 128
    kv, what = _CACHES[kind], f"attention over keys in {kind}"
    q, k, v = (
        _random(ops, seed, length, n, dim) for seed, n in enumerate((heads, kv_heads, kv_heads))
    )
    packed = Layout.packed([length])
    store = KVStore.allocate(packed.num_slots, kv_heads, dim, kv, BF16, None, ops.device)
    ops.kv_write(store, k, v, packed.to(ops.device))

    def attend(rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        given = rows.contiguous(), store, layout.to(ops.device), dim**-0.5
        return ops.attend(*given, out_type=torch.float32)

    whole = attend(q, packed)
    starts = [0, 1, length // 4, length // 2, length - 1]
    one = Layout.build(
        [1] * len(starts), starts, packed.page_table.expand(len(starts), -1).contiguous(), 16
    )
    parts = {"decoded rows have": (attend(q[starts], one), torch.tensor(starts))}
    for rows in (12, 25):
        chunk = Layout.build([rows], [length - rows], packed.page_table, 16)
        last = torch.arange(length - rows, length)
        parts[f"a chunk of {rows} rows has"] = attend(q[-rows:], chunk), last
    for part, (found, at) in parts.items():
        same = all(_same(x, among[at.to(among.device)]) for x, among in zip(found, whole))
        yield f"{what}: {part} other bits than a whole sequence", same
    reference = ReferenceOps("exact")
    there = KVStore.allocate(packed.num_slots, kv_heads, dim, kv, BF16)
    reference.kv_write(there, k.cpu(), v.cpu(), packed)
    yield f"{what}: other codes are stored than the definition's", _same(store.k.cpu(), there.k)
    wanted = reference.attention(q.cpu(), there, packed, dim**-0.5)
    for name, x, exact in zip((what, f"{what}, logarithms of sums"), whole, wanted):
        yield _near(name, x, exact)


def _recurrent(ops: Ops, sizes: tuple[int, int, int, int], rule: str) -> Iterator[Found]:
    """Linear attention by a rule over a whole sequence, as a learner's, and from states that are
    kept: a chunk, a row, the others. Mamba-2's convolution has a bias."""
    length, key_heads, value_heads, dim = sizes
    channels = (2 * key_heads + value_heads) * dim
    x, weight = _random(ops, 0, length, channels), _random(ops, 1, channels, 4).float()
    heads = DeltaHeads(key_heads, value_heads, dim, dim, *_random(ops, 3, 2, value_heads).float())
    bias = None
    if rule == "Mamba-2":
        heads = replace(heads, skip=_random(ops, 4, value_heads).float(), least_step=0.02)
        bias = _random(ops, 5, channels).float()
    gates = _random(ops, 2, length, heads.gates).float()
    packed, convolution = Layout.packed([length]), f"convolution of {rule}"
    at_once, kept = (
        StateStore.allocate(
            packed.page_table.shape[1], (3, channels), (value_heads, dim, dim), BF16, ops.device
        )
        for _ in range(2)
    )

    def run(lo: int, hi: int, store: StateStore | None) -> list[Tensor]:
        layout = Layout.build([hi - lo], [lo], packed.page_table, packed.page_size).to(ops.device)
        mixed = ops.short_convolution(x[lo:hi], weight, store, layout, bias)
        return [mixed, ops.delta_rule(mixed, gates[lo:hi], heads, store, layout).flatten(1)]

    whole, middle = run(0, length, None), length // 2
    steps = ((0, middle), (middle, middle + 1), (middle + 1, length))
    parts = zip(*(run(lo, hi, kept) for lo, hi in steps))
    for what, found, divided in zip((convolution, rule), whole, parts):
        same = _same(torch.cat(divided), found)
        yield f"{what}: a sequence in parts has other bits than the whole one", same
    run(0, length, at_once)
    same = _same(at_once.states, kept.states)
    yield f"{rule}: a sequence in parts leaves other states than the whole one", same
    wanted = _recurrent_by_definition(x, weight, bias, whole[0], gates, heads)
    for what, found, exact in zip((convolution, rule), whole, wanted):
        yield _near(what, found, exact)


def _recurrent_by_definition(
    x: Tensor, weight: Tensor, bias: Tensor | None, mixed: Tensor, gates: Tensor, heads: DeltaHeads
) -> tuple[Tensor, Tensor]:
    """Return the convolution of x, and what is recalled of `mixed`."""
    reference, layout = ReferenceOps("exact"), Layout.packed([len(x)])
    skip = None if heads.skip is None else heads.skip.cpu()
    there = replace(heads, decay=heads.decay.cpu(), step_bias=heads.step_bias.cpu(), skip=skip)
    convolved = reference.short_convolution(
        x.cpu(), weight.cpu(), None, layout, None if bias is None else bias.cpu()
    )
    recalled = reference.delta_rule(mixed.cpu(), gates.cpu(), there, None, layout)
    return convolved, recalled.flatten(1)


def _head(ops: Ops) -> Iterator[Found]:
    vocabulary = 500
    x, w = _random(ops, 0, _ROWS, 192), _random(ops, 1, vocabulary, 192) * 0.05
    keys = torch.arange(4 * _ROWS, device=ops.device).view(_ROWS, 4)
    sampled, logprobs = ops.head_sample(x, w, keys, 1.0)
    tokens = sampled.clamp(0, vocabulary - 1)
    yield "output head: a token that is not in the vocabulary is sampled", _same(sampled, tokens)

    def rows(lo: int, hi: int) -> tuple[Tensor]:
        return (ops.head_logprobs(x[lo:hi], w, tokens[lo:hi], 1.0)[0],)

    whole = rows(0, _ROWS)
    yield (
        "output head: the sampler's log-probabilities have other bits than the learner's",
        _same(logprobs, whole[0]),
    )
    yield from _alone("output head", rows, whole)
    wanted = torch.log_softmax(x.cpu().double() @ w.cpu().double().t(), -1)
    yield _near("output head", whole[0], wanted[torch.arange(_ROWS), tokens.cpu()])


def _quantized(ops: Ops, width: int) -> Iterator[Found]:
    """Norms and gates with their quantization, whose codes are the norm's and gate's own; scales
    and a norm's factor are float32."""
    sizes = (_ROWS, width), (width,), (_ROWS, 2 * width)
    x, weight, gate_up = (_random(ops, seed, *size) for seed, size in enumerate(sizes))

    def norm(lo: int, hi: int) -> tuple[Tensor, ...]:
        y, _, factor = ops.rms_norm_quantized(x[lo:hi], weight, 1e-6, None, _ROW, "x")
        return _codes(y), y.scale, factor

    def gate(lo: int, hi: int) -> tuple[Tensor, ...]:
        h = ops.gate_mul_quantized("silu", gate_up[lo:hi], _ROW, "h")
        return _codes(h), h.scale

    yield from _alone("norm", norm, norm(0, _ROWS))
    yield from _alone("gate", gate, gate(0, _ROWS))
    found, wanted = ops.quantize(x, _ROW), ReferenceOps("exact").quantize(x.cpu(), _ROW)
    same = _same(_codes(found).cpu(), _codes(wanted)) and _same(found.scale.cpu(), wanted.scale)
    yield "quantization: other codes or scales than the definition's", same


def _rounded(ops: Ops) -> Iterator[Found]:
    """Yield stochastically rounded masters, from an element in the middle of a parameter on."""
    x, given = _random(ops, 0, 5000).float() * 1.001, (1 << 40 | 7, 3, 4096)
    found, wanted = ops.round_stochastically(x, *given), round_stochastically(x.cpu(), *given)
    same = _same(found.cpu(), wanted)
    yield "stochastic rounding: other bits than the definition's", same


def _codes(x: QTensor) -> Tensor:
    return x.data.view(torch.uint8)
