"""Whether the kernels keep on this GPU what they promise, before a run counts on it.

Nothing but a run on a GPU can show that its matrix instructions give a row the same bits alone and
among others. So the first start on a machine computes products, attention, linear attention, the
output head, norms and gates: rows alone, a few of them and all must agree in every bit, and be the
reference's within a bound; and the rounding of BF16 masters, in every bit. Most of the time goes
into compiling. A pass is remembered for the GPU, its driver, the versions of PyTorch and Triton,
and the kernels' sources. Left out: whole models (`python -m benchmarks.gpu`), the backward, and
several GPUs of which one is broken.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from isobit.kernels.attention.triton import forward as attention
from isobit.kernels.backends.reference import ReferenceOps
from isobit.kernels.cache import CacheUnusable, cache_directory, unless_passed
from isobit.kernels.gpu import versions
from isobit.kernels.matrices import Operand, values
from isobit.kernels.ops import DeltaHeads, Layout, Ops
from isobit.kernels.optim.definition import round_stochastically
from isobit.kernels.stores import KVStore, StateStore
from isobit.precision import BF16, E4M3, INT8, QTensor, QuantSpec

_BLOCK, _ROW = QuantSpec(E4M3, "128x128"), QuantSpec(E4M3, "1x128")
_CACHES = {"BF16": None, "FP8": QuantSpec(E4M3, "row"), "INT8": QuantSpec(INT8, "row", "fp32")}
_ROWS = 80  # more than one tile, and not whole ones
_PARTS = ((0, 1), (79, 80), (3, 20), (10, 75))
_SIZES = ((192, 640), (64, 8192))  # outputs and inputs of products; the second sums in chunks
_LENGTH = 600  # of a sequence: two splits of keys
_WIDTH = 384  # of what is normed and gated
_STATES = (
    _ROWS,
    2,
    4,
    128,
)  # rows of linear attention, its heads of keys and of values, their dimension
_BOUND = 2.0**-7  # of the largest result: BF16 rounds by half of this at most
Found = tuple[str, bool]


def failures(ops: Ops, fp8: bool = True) -> list[str]:
    """What does not hold here, a phrase each."""
    kinds = ("BF16", "FP8", "INT8") if fp8 else ("BF16", "INT8")
    return [what for kind in kinds for what, holds in _all(ops, kind) if not holds]


def remembered(ops: Ops, fp8: bool = True) -> list[str]:
    """`failures`, unless there were none before on the same GPU with the same software.

    Decoding's attention exchanges the operands of the learner's matrix instructions, which no
    specification says to keep bits. Where attention alone fails, it is asked again with all rows on
    one side, and computes so if that holds.
    """
    try:
        place = cache_directory("gpu")
    except CacheUnusable:
        place = None
    rows_first = f"{_identity()}.rows-first.passed"
    if place is None or not (place / rows_first).exists():
        found = _once(ops, fp8, place, f"{_identity()}.passed")
        if not found or not all(what.startswith("attention over keys") for what in found):
            return found
    attention.put_rows_first()
    return _once(ops, fp8, place, rows_first)


def _once(ops: Ops, fp8: bool, place: Path | None, name: str) -> list[str]:
    if place is None:
        return failures(ops, fp8)
    return unless_passed(place / name, lambda: failures(ops, fp8), [])


def _identity() -> str:
    digest = hashlib.sha256(repr(sorted(versions().items())).encode())
    with suppress(OSError):
        digest.update(Path("/proc/driver/nvidia/version").read_bytes())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _all(ops: Ops, kind: str) -> Iterator[Found]:
    yield from _attention(ops, kind)
    if kind == "INT8":  # of the cache alone
        return
    for outputs, inputs in _SIZES:
        yield from _product(ops, kind, outputs, inputs)
    if kind == "FP8":
        yield from _quantized(ops)
    else:
        yield from _head(ops)
        yield from _rounded(ops)
        yield from _recurrent(ops)


def _random(ops: Ops, seed: int, *shape: int) -> Tensor:
    """BF16 of widely varying magnitudes: sums of equal ones would hide an order. The user's
    generators stay as they are."""
    signed, exponents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))
    return (signed * torch.exp(exponents)).bfloat16().to(ops.device)


def _alone(what: str, call: Callable[[int, int], Tensor], whole: Tensor) -> Iterator[Found]:
    """Parts of the rows against all of them."""
    for lo, hi in _PARTS:
        same = torch.equal(call(lo, hi), whole[lo:hi])
        yield f"{what}: rows {lo} to {hi} have other bits than among {_ROWS}", same


def _near(what: str, found: Tensor, wanted: Tensor) -> Found:
    error = (found.cpu().double() - wanted.double()).abs().max() / wanted.double().abs().max()
    return f"{what}: off by {float(error):.1e} of the largest result", bool(error <= _BOUND)


def _product(ops: Ops, kind: str, outputs: int, inputs: int) -> Iterator[Found]:
    x, w = _random(ops, 0, _ROWS, inputs), _random(ops, 1, outputs, inputs)
    a: Operand = ops.quantize(x, _ROW) if kind == "FP8" else x
    b: Operand = ops.quantize(w, _BLOCK) if kind == "FP8" else w
    what, whole = f"{kind} product of {inputs} inputs", ops.product(a, b)
    yield from _alone(what, lambda lo, hi: ops.product(_rows(a, lo, hi), b), whole)
    yield _near(what, whole, values(a).cpu().double() @ values(b).cpu().double().t())


def _rows(x: Operand, lo: int, hi: int) -> Operand:
    return QTensor(x.data[lo:hi], x.scale[lo:hi], x.spec) if isinstance(x, QTensor) else x[lo:hi]


def _attention(ops: Ops, kind: str) -> Iterator[Found]:
    """A sequence at once, some of its rows as if decoded one by one, and its last ones in chunks:
    tiles of 16, 32, 64 and 128 rows, which stand on either side of the matrix instruction."""
    heads, kv_heads, dim, length = 2, 1, 128, _LENGTH
    kv, what = _CACHES[kind], f"attention over keys in {kind}"
    q, k, v = (
        _random(ops, seed, length, n, dim) for seed, n in enumerate((heads, kv_heads, kv_heads))
    )
    packed = Layout.packed([length])
    store = KVStore.allocate(packed.num_slots, kv_heads, dim, kv, BF16, None, ops.device)
    ops.kv_write(store, k, v, packed.to(ops.device))
    whole = ops.attention(q, store, packed.to(ops.device), dim**-0.5)[0]
    starts = [0, 1, length // 2, length - 1]
    one = Layout.build(
        [1] * len(starts), starts, packed.page_table.expand(len(starts), -1).contiguous(), 16
    )
    decoded = ops.attention(q[starts].contiguous(), store, one.to(ops.device), dim**-0.5)[0]
    yield (
        f"{what}: decoded rows have other bits than a whole sequence's",
        torch.equal(decoded, whole[starts]),
    )
    for rows in (12, 25):
        chunk = Layout.build([rows], [length - rows], packed.page_table, 16).to(ops.device)
        part = ops.attention(q[-rows:].contiguous(), store, chunk, dim**-0.5)[0]
        yield (
            f"{what}: a chunk of {rows} rows has other bits than a whole sequence",
            torch.equal(part, whole[-rows:]),
        )
    reference = ReferenceOps("exact")
    there = KVStore.allocate(packed.num_slots, kv_heads, dim, kv, BF16)
    reference.kv_write(there, k.cpu(), v.cpu(), packed)
    yield (
        f"{what}: other codes are stored than the definition's",
        torch.equal(store.k.cpu(), there.k),
    )
    yield _near(what, whole, reference.attention(q.cpu(), there, packed, dim**-0.5)[0])


def _recurrent(ops: Ops) -> Iterator[Found]:
    """Linear attention over a learner's whole sequence, and from states that are kept: a chunk, a
    row, the others."""
    length, key_heads, value_heads, dim = _STATES
    channels = (2 * key_heads + value_heads) * dim
    x, weight = _random(ops, 0, length, channels), _random(ops, 1, channels, 4).float()
    gates = _random(ops, 2, length, 2 * value_heads).float()
    heads = DeltaHeads(key_heads, value_heads, dim, dim, *_random(ops, 3, 2, value_heads).float())
    packed = Layout.packed([length])
    store = StateStore.allocate(
        packed.page_table.shape[1], (3, channels), (value_heads, dim, dim), BF16, ops.device
    )

    def run(lo: int, hi: int, store: StateStore | None = store) -> list[Tensor]:
        layout = Layout.build([hi - lo], [lo], packed.page_table, packed.page_size).to(ops.device)
        mixed = ops.short_convolution(x[lo:hi], weight, store, layout)
        return [mixed, ops.delta_rule(mixed, gates[lo:hi], heads, store, layout).flatten(1)]

    whole, middle = run(0, length, None), length // 2
    parts = zip(
        *(run(lo, hi) for lo, hi in ((0, middle), (middle, middle + 1), (middle + 1, length)))
    )
    for what, found, divided in zip(("convolution", "delta rule"), whole, parts):
        same = torch.equal(torch.cat(divided), found)
        yield f"{what}: a sequence in parts has other bits than the whole one", same
    reference = ReferenceOps("exact")
    there = replace(heads, decay=heads.decay.cpu(), step_bias=heads.step_bias.cpu())
    yield _near(
        "convolution", whole[0], reference.short_convolution(x.cpu(), weight.cpu(), None, packed)
    )
    wanted = reference.delta_rule(whole[0].cpu(), gates.cpu(), there, None, packed).flatten(1)
    yield _near("delta rule", whole[1], wanted)


def _head(ops: Ops) -> Iterator[Found]:
    x, w = _random(ops, 0, _ROWS, 192), _random(ops, 1, 500, 192) * 0.05
    keys = torch.arange(4 * _ROWS, device=ops.device).view(_ROWS, 4)
    tokens, sampled = ops.head_sample(x, w, keys, 1.0)
    whole = ops.head_logprobs(x, w, tokens, 1.0)[0]
    yield (
        "output head: the sampler's log-probabilities have other bits than the learner's",
        torch.equal(sampled, whole),
    )
    yield from _alone(
        "output head", lambda lo, hi: ops.head_logprobs(x[lo:hi], w, tokens[lo:hi], 1.0)[0], whole
    )
    wanted = torch.log_softmax(x.cpu().double() @ w.cpu().double().t(), -1)
    yield _near("output head", whole, wanted[torch.arange(_ROWS), tokens.cpu()])


def _quantized(ops: Ops) -> Iterator[Found]:
    """Norms and gates with their quantization, whose codes are the norm's and gate's own."""
    sizes = (_ROWS, _WIDTH), (_WIDTH,), (_ROWS, 2 * _WIDTH)
    x, weight, gate_up = (_random(ops, seed, *size) for seed, size in enumerate(sizes))

    def norm(lo: int, hi: int) -> Tensor:
        return _codes(ops.rms_norm_quantized(x[lo:hi], weight, 1e-6, None, _ROW, "x")[0])

    def gate(lo: int, hi: int) -> Tensor:
        return _codes(ops.gate_mul_quantized("silu", gate_up[lo:hi], _ROW, "h"))

    yield from _alone("norm", norm, norm(0, _ROWS))
    yield from _alone("gate", gate, gate(0, _ROWS))
    found, wanted = ops.quantize(x, _ROW), ReferenceOps("exact").quantize(x.cpu(), _ROW)
    same = torch.equal(_codes(found).cpu(), _codes(wanted)) and torch.equal(
        found.scale.cpu(), wanted.scale
    )
    yield "quantization: other codes or scales than the definition's", same


def _rounded(ops: Ops) -> Iterator[Found]:
    """Of masters that are kept in BF16, from an element in the middle of a parameter on."""
    x, given = _random(ops, 0, 5000).float() * 1.001, (1 << 40 | 7, 3, 4096)
    found, wanted = ops.round_stochastically(x, *given), round_stochastically(x.cpu(), *given)
    same = torch.equal(found.cpu().view(torch.int16), wanted.view(torch.int16))
    yield "stochastic rounding: other bits than the definition's", same


def _codes(x: QTensor) -> Tensor:
    return x.data.view(torch.uint8)
