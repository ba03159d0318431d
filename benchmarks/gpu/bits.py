"""Whether the bits are right on this GPU, before anything is timed: the claims of docs/gpu.md, each
with its controls.

Every row says how many elements were compared, how many of them differ, whether they should, and so
whether the claim holds. Results that are zero or not finite prove nothing, and do not hold. The
first cases force each tile of a product in turn, whose tokens are the N of the matrix instruction
(16, 32, 64, 128); the last multiply by cuBLAS in two processes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import adapters, approximate, two_processes
from benchmarks.gpu.common import Bench, Case, random_model, shapes
from benchmarks.gpu.comparing import ROW, columns_of, compared, cuts, operands
from benchmarks.gpu.decode import decode_step
from benchmarks.gpu.instruction import compare_instruction
from benchmarks.work import linear_sizes
from isobit import Completion, Engine, Model, Sampling
from isobit.kernels import Divided, KVStore, Layout, Operand, Stacked, get_ops
from isobit.kernels.attention.triton.forward import attend, keys_first
from isobit.kernels.matrices import rows_of
from isobit.kernels.product.triton import product as product_module
from isobit.kernels.product.triton.cublas import cublas_product, takes
from isobit.kernels.product.triton.plan import ProductPlan, plan, splits_of
from isobit.model import ModelConfig
from isobit.model.weights import layout
from isobit.precision import BF16, E4M3, INT8, QTensor, QuantSpec

_HEAD = QuantSpec(E4M3, "row")
_HEAD_INT8 = QuantSpec(INT8, "row", "fp32")
ROWS_OF_TILES = 128
TILES = ((64, 16, 4, 6), (64, 32, 4, 6), (64, 64, 4, 5), (128, 64, 8, 4), (128, 128, 8, 4))
"""(rows of the weight, tokens, warps, stages) of a tile: every one that a plan may choose."""
TOKENS_FIRST = ((32, 64, 4, 13), (64, 64, 4, 5), (128, 64, 4, 4), (128, 128, 8, 4))
"""Those of FP8 that have tokens on the long side of the instruction."""


MODELS = ("Qwen3-0.6B", "Qwen3-8B")


def sizes_of(models: Mapping[str, ModelConfig]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of their products, by model and layer."""
    return {
        f"{name} {layer}": size
        for name in models
        for layer, size in linear_sizes(models[name]).items()
    }


SHARDED = {
    "Qwen3-4B": (2560, 32, 9728),
    "Qwen3-8B": (4096, 32, 12288),
    "Qwen3-14B": (5120, 40, 17408),
    "Qwen3-32B": (5120, 64, 25600),
    "Llama-3.3-70B": (8192, 64, 28672),
}
"""Hidden size, query heads, and inner size of an MLP; heads of 128, 8 of keys."""

MIXTURES = {
    "Qwen3-30B-A3B gate_up": (128, 1536, 2048),
    "Qwen3-30B-A3B down": (128, 2048, 768),
    "Qwen3-235B-A22B down": (128, 4096, 1536),
}
"""Experts, and each's outputs and inputs."""


def sharded_sizes() -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (outputs, inputs) of the products of models that several GPUs hold together."""
    for name, (hidden, heads, inner) in SHARDED.items():
        yield f"{name} qkv", ((heads + 16) * 128, hidden)
        yield f"{name} o", (hidden, heads * 128)
        yield f"{name} gate_up", (2 * inner, hidden)
        yield f"{name} down", (hidden, inner)


Check = Callable[[Case, Bench], None]


def run(bench: Bench) -> None:
    """What says most first: a rollout against the learner, attention, the widest model's products in
    FP8; then all the others."""
    for name, check in _cases(bench):
        if bench.wants(name):
            with bench.case(name) as case:
                check(case, bench)
        if name == "cuBLAS against Triton":
            two_processes.run(bench)


def _cases(bench: Bench) -> Iterator[tuple[str, Check]]:
    yield "the matrix instruction against the model of Hopper's", _instruction
    models = shapes(bench)
    small, large = ("toy", "toy") if bench.rehearsal else MODELS
    flows = [(small, "fp8")] if bench.rehearsal else [
        (small, "fp8"), (large, "fp8"), (small, "bf16"), ("Qwen3-30B-A3B", "fp8"),
        (large, "fp8-unified"),
    ]  # fmt: skip
    whole = [
        (f"{what}, {name}, {preset}", partial(check, replace(models[name], num_layers=2), preset))
        for name, preset in flows
        for what, check in (("engine against learner", _engine), ("replay against eager", _replay))
    ]
    yield from whole[:2]
    for name, kv in (("int8", _HEAD_INT8), ("e4m3", _HEAD), ("bf16", None)):
        yield f"attention, {name} cache: decoding against packed", partial(_attention, kv)
    products = [
        (f"{what}, {kind}, {layer}", partial(check, kind, *size))
        for name in dict.fromkeys((large, small))
        for kind in ("fp8", "bf16")
        for layer, size in sizes_of({name: models[name]}).items()
        for what, check in (("tiles", _tiles), ("rows", _rows_of_products))
    ]
    first = len(sizes_of({large: models[large]})) * 2
    yield from products[:first]
    yield from whole[2:]
    yield "rows of the output head", _head
    yield "rows of norms and gates", _between
    yield "rows of experts", _experts
    for layer, size in {"toy": (544, 512)}.items() if bench.rehearsal else sharded_sizes():
        yield f"shards, {layer}", partial(_shards, *size)
    mixtures = {"toy": (3, 272, 512)} if bench.rehearsal else MIXTURES
    for layer, sizes in mixtures.items():
        yield f"shards, experts of {layer}", partial(_shards_of_experts, *sizes)
    yield "adapters together and alone", adapters.check
    yield "sigmoid of gradients against float64", approximate.check
    yield "cuBLAS against Triton", _cublas
    yield from products[first:]


def _instruction(case: Case, bench: Bench) -> None:
    """What the tests compute with where there is no GPU (`instruction.py`)."""
    for row in compare_instruction(bench.device):
        case.row(**row)


@contextmanager
def forced(tile: tuple[int, int, int, int], tokens_first: bool = False) -> Iterator[None]:
    """Inside, every product has this tile, and its chunks are summed as the plan says."""
    tile_n, tile_m, warps, stages = tile

    def chosen_tile(*given: Any) -> ProductPlan:
        chosen = replace(plan(*given), num_warps=warps, num_stages=stages)
        return replace(chosen, tile_n=tile_n, tile_m=tile_m, tokens_first=tokens_first)

    before, product_module.plan = product_module.plan, chosen_tile
    try:
        yield
    finally:
        product_module.plan = before


def _tiles(kind: str, outputs: int, inputs: int, case: Case, bench: Bench) -> None:
    """The same product by every tile. The control: one weight changed."""
    rows = 5 if bench.rehearsal else ROWS_OF_TILES
    x, w = operands(kind, rows, outputs, inputs, get_ops("triton"))
    found: dict[tuple[int, int, int, int], Tensor] = {}
    for tile in TILES:
        with case.attempt(f"N = {tile[1]}, {tile[0]} rows of the weight"), forced(tile):
            found[tile] = product_module.product(x, w, None, torch.float32)
    first = found.get(TILES[0])
    if first is None:
        return
    for tile, y in found.items():
        if tile != TILES[0]:
            compared(case, f"N = {tile[1]}, {tile[0]} rows of the weight, against N = 16", y, first)
    for tile in TOKENS_FIRST if kind == "fp8" and keys_first() else ():
        what = f"{tile[1]} tokens on the long side, {tile[0]} rows of the weight"
        with case.attempt(what), forced(tile, True):
            y = product_module.product(x, w, None, torch.float32)
            compared(case, f"{what}, against N = 16", y, first)
    changed = _with_one_weight_changed(w)
    with forced(TILES[0]):
        control = product_module.product(x, changed, None, torch.float32)
    compared(case, "one block of weights changed", control, first, "different")


def _with_one_weight_changed(w: Operand) -> Operand:
    if isinstance(w, QTensor):
        scale = w.scale.clone()
        scale[0, 0] *= 2
        return QTensor(w.data, scale, w.spec)
    changed = w.clone()
    changed[0, :16] *= 2
    return changed


def _rows_of_products(kind: str, outputs: int, inputs: int, case: Case, bench: Bench) -> None:
    """Rows alone, by the instruction's sizes, and in 8,192; the control: the same rows after
    others."""
    count, sizes = (
        (9, (1, 4)) if bench.rehearsal else (8192, (1, 16, 32, 64, 128, 2, 63, 65, 512, 4097))
    )
    ops = get_ops("triton")
    x, w = operands(kind, count, outputs, inputs, ops)
    whole = ops.product(x, w, None, torch.float32)
    for size in sizes:
        for start in (0, count // 2, count - size):
            if start + size <= count:
                alone = ops.product(rows_of(x, start, start + size), w, None, torch.float32)
                compared(
                    case, f"{size} from {start} of {count:,}", alone, whole[start : start + size]
                )
    beside = ops.product(rows_of(x, 1, 2), w, None, torch.float32)
    compared(case, "a row beside its neighbour", beside, whole[:1], "different")


def _shards(outputs: int, inputs: int, case: Case, bench: Bench) -> None:
    """A shard's product against the same rows of the whole weight's, for 2, 4 and 8 shards. The
    control, where the plan of as few rows is another: a shard that does not know the whole."""
    ops = get_ops("triton")
    for kind in ("fp8", "bf16", "fp32") if bench.rehearsal else ("fp8", "bf16"):
        x, w = operands(kind, 2 if bench.rehearsal else 512, outputs, inputs, ops)
        dtype = torch.uint8 if isinstance(w, QTensor) else w.dtype
        for rows in (2,) if bench.rehearsal else (1, 64, 512):
            few = rows_of(x, 0, rows)
            whole = ops.product(few, w, None, torch.float32)
            for lo, hi in sorted({range_ for size in (2, 4, 8) for range_ in cuts(outputs, size)}):
                shard = layout.rows_of(w, (lo, hi))
                known = Divided(shard, None, whole_rows=outputs)
                what = f"{kind}, {rows} tokens, rows {lo} to {hi} of {outputs}"
                found = ops.product(few, known, None, torch.float32)
                compared(case, what, found, whole[:, lo:hi])
                if splits_of(hi - lo, inputs, dtype) != splits_of(outputs, inputs, dtype):
                    alone = ops.product(few, shard, None, torch.float32)
                    compared(case, f"{what}, alone", alone, whole[:, lo:hi], "different")


def _shards_of_experts(count: int, outputs: int, inputs: int, case: Case, bench: Bench) -> None:
    """Rows of every expert, and some whole experts, against all, for 2, 4 and 8 shards. The control:
    two halves of the columns, whose float32 sums are added."""
    ops, rows = get_ops("triton"), 7
    offsets = torch.arange(count + 1, device=bench.device) * rows
    for kind in ("fp8", "bf16", "fp32") if bench.rehearsal else ("fp8", "bf16"):
        x, _ = operands(kind, count * rows, 1, inputs, ops)
        weights = [operands(kind, 1, outputs, inputs, ops)[1] for _ in range(count)]
        whole = ops.grouped_product(x, Stacked.of(weights, count), offsets, torch.float32)
        for lo, hi in sorted({range_ for size in (2, 4, 8) for range_ in cuts(outputs, size)}):
            shard = Stacked.of((layout.rows_of(w, (lo, hi)) for w in weights), count)
            found = ops.grouped_product(x, shard, offsets, torch.float32)
            compared(case, f"{kind}, rows {lo} to {hi} of {outputs}", found, whole[:, lo:hi])
        for first, last in {(0, -(-count // size)) for size in (2, 4, 8)}:
            own = Stacked.of(weights[first:last], last - first)
            found = ops.grouped_product(
                rows_of(x, 0, last * rows), own, offsets[: last + 1], torch.float32
            )
            compared(case, f"{kind}, experts 0 to {last} of {count}", found, whole[: last * rows])
        half = inputs // 256 * 128
        sums = [
            ops.grouped_product(
                columns_of(x, *cut), Stacked.of((columns_of(w, *cut) for w in weights), count),
                offsets, torch.float32,
            )
            for cut in ((0, half), (half, inputs))
        ]  # fmt: skip
        compared(case, f"{kind}, halves of the columns", sums[0] + sums[1], whole, "different")


def _head(case: Case, bench: Bench) -> None:
    """Log-probabilities of 8,192 rows, of rows alone, and of the fused sampler."""
    rows, vocabulary, hidden = (9, 300, 48) if bench.rehearsal else (8192, 151936, 1024)
    ops = get_ops("triton")
    x, w = (torch.randn(n, hidden, device=bench.device).bfloat16() for n in (rows, vocabulary))
    w *= 0.05
    keys = torch.arange(4 * rows, device=bench.device).view(rows, 4)
    tokens, sampled = ops.head_sample(x, w, keys, 1.0)
    whole = ops.head_logprobs(x, w, tokens, 1.0)[0]
    compared(case, "sampler against log-probabilities", sampled, whole)
    for size in (1, 4) if bench.rehearsal else (1, 16, 32, 64, 128, 512):
        part = slice(rows - size, rows)
        compared(
            case,
            f"{size} of {rows:,}",
            ops.head_logprobs(x[part], w, tokens[part], 1.0)[0],
            whole[part],
        )
        compared(
            case,
            f"{size} of {rows:,}, sampled",
            ops.head_sample(x[part], w, keys[part], 1.0)[1],
            whole[part],
        )
    compared(
        case, "another temperature", ops.head_logprobs(x, w, tokens, 0.9)[0], whole, "different"
    )


def _experts(case: Case, bench: Bench) -> None:
    """An expert's rows alone, and beside those of others; the control: by another expert."""
    count, each, outputs, inputs = (3, 7, 40, 48) if bench.rehearsal else (128, 64, 1536, 2048)
    ops = get_ops("triton")
    for kind in ("fp8", "bf16"):
        x, _ = operands(kind, count * each, 1, inputs, get_ops("triton"))
        stacked = Stacked.of(
            (operands(kind, 1, outputs, inputs, get_ops("triton"))[1] for _ in range(count)), count
        )
        whole = ops.grouped_product(
            x, stacked, torch.arange(count + 1, device=bench.device) * each, torch.float32
        )

        def by(
            expert: int, start: int, size: int, x: Operand = x, stacked: Stacked = stacked
        ) -> Tensor:
            """Rows from `start` by one expert, nothing else in the batch."""
            offsets = torch.zeros(count + 1, dtype=torch.int64, device=bench.device)
            offsets[expert + 1 :] = size
            return ops.grouped_product(
                rows_of(x, start, start + size), stacked, offsets, torch.float32
            )

        for expert in (0, count - 1):
            for size in (1, each // 2, each):
                start = expert * each + each - size
                wanted = whole[start : start + size]
                compared(
                    case, f"{kind}, {size} rows of expert {expert}", by(expert, start, size), wanted
                )
        compared(case, f"{kind}, by another expert", by(1, 0, each), whole[:each], "different")


def _between(case: Case, bench: Bench) -> None:
    """Norms and gates with their quantization: rows alone and in 8,192."""
    rows, hidden, inner = (9, 160, 96) if bench.rehearsal else (8192, 4096, 12288)
    ops = get_ops("triton")
    x, residual, gate_up = (
        torch.randn(rows, n, device=bench.device).bfloat16() for n in (hidden, hidden, 2 * inner)
    )
    weight = torch.randn(hidden, device=bench.device).bfloat16()

    def norm(part: slice) -> QTensor:
        return ops.rms_norm_quantized(x[part], weight, 1e-6, residual[part], ROW, "x")[0]

    def gate(part: slice) -> QTensor:
        return ops.gate_mul_quantized("silu", gate_up[part], ROW, "h")

    for name, call in (("rms_norm_quantized", norm), ("gate_mul_quantized", gate)):
        whole = call(slice(0, rows))
        for size in (1, 4) if bench.rehearsal else (1, 16, 129):
            part = slice(rows - size, rows)
            found = call(part)
            compared(case, f"{name}, codes of {size}", _codes(found), _codes(whole)[part])
            compared(case, f"{name}, scales of {size}", found.scale, whole.scale[part])
        compared(
            case, f"{name}, another row", _codes(call(slice(0, 1))), _codes(whole)[1:2], "different"
        )


def _codes(x: QTensor) -> Tensor:
    return x.data.view(torch.uint8)


def _attention(kv: QuantSpec | None, case: Case, bench: Bench) -> None:
    """A sequence's rows decoded one by one, and in chunks, against the packed forward; the control:
    other values."""
    heads, kv_heads, dim = (4, 2, 16) if bench.rehearsal else (32, 8, 128)
    length, chunk = (12, 5) if bench.rehearsal else (1300, 600)
    ops = get_ops("triton")
    q, k, v = (
        torch.randn(length, n, dim, device=bench.device).bfloat16()
        for n in (heads, kv_heads, kv_heads)
    )
    packed = Layout.packed([length]).to(ops.device)
    store = KVStore.allocate(packed.num_slots, kv_heads, dim, kv, BF16, None, ops.device)
    ops.kv_write(store, k, v, packed)
    in_float32 = partial(attend, scale=dim**-0.5, out_type=torch.float32)
    whole, lse = in_float32(q, store, packed)
    table = packed.page_table.cpu()
    for name, first, size in (
        ("one by one", 0, 1),
        ("the last rows one by one", length - 64, 1),
        ("a chunk", chunk, chunk),
    ):
        starts = [max(first, 0) + i * size for i in range(1 if size > 1 else min(64, length))]
        starts = [start for start in starts if start + size <= length]
        layout = Layout.build(
            [size] * len(starts), starts, table.expand(len(starts), -1).contiguous(), 16
        )
        rows = torch.cat([torch.arange(start, start + size) for start in starts]).to(ops.device)
        found, sums = in_float32(q[rows], store, layout.to(ops.device))
        compared(case, f"{name}, {rows.numel()} rows", found, whole[rows])
        compared(case, f"{name}, log of sums", sums, lse[rows])
    ops.kv_write(store, k, v.roll(1, 0), packed)
    compared(case, "other values", in_float32(q, store, packed)[0], whole, "different")


def _replay(config: ModelConfig, preset: str, case: Case, bench: Bench) -> None:
    """A decode step as it is launched, and replayed from a graph; the control: another cache."""
    model = random_model(config, preset)
    for batch, context in (
        ((2, 20),) if bench.rehearsal else ((1, 1000), (17, 1000), (64, 4000), (512, 1000))
    ):
        step = decode_step(model, batch, context)
        wanted = step()[1].clone()
        found = step()[1] if bench.rehearsal else _replayed(step)
        compared(case, f"batch {batch}, context {context}, log-probabilities", found, wanted)
    other = decode_step(model, batch, context - 1)()[1]
    compared(case, "another cache", other, wanted, "different")


def _replayed(step: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    """Log-probabilities of the second replay, over what the first has written."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        logprobs = step()[1]
    graph.replay()
    logprobs.fill_(torch.nan)  # what is not written is noticed
    graph.replay()
    torch.cuda.synchronize()
    return logprobs.clone()


def _engine(config: ModelConfig, preset: str, case: Case, bench: Bench) -> None:
    """What the engine records and what the learner computes, with graphs and without; prompts of
    mixed lengths, in chunks, and few pages. Controls: a learner in BF16, and other weights."""
    model = random_model(config, preset)
    lengths = (1, 5) if bench.rehearsal else (1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 129, 500, 1500)
    samples, new, pages = (1, 2, 20) if bench.rehearsal else (4, 24, 320)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()
        for length in lengths
    ]

    def rollout(graphs: bool, **sizes: int) -> list[Completion]:
        given = {"max_batch_tokens": 700, "max_sequences": 40} | sizes
        engine = Engine(model, kv_pages=pages, page_size=16, cuda_graphs=graphs, **given)
        groups = engine.generate(prompts, Sampling(samples, new, seed=3, ignore_eos=True))
        engine.integrity()
        return [completion for group in groups for completion in group]

    def learned(by: Model, completions: Sequence[Completion]) -> Tensor:
        found = by.logprobs([c.prompt_token_ids + c.token_ids for c in completions])
        return torch.cat([f[len(c.prompt_token_ids) - 1 :] for f, c in zip(found, completions)])

    completions = rollout(True)
    recorded = torch.cat([torch.tensor(c.logprobs) for c in completions])
    compared(case, "rollout against learner", recorded, learned(model, completions))
    others = {"small steps": rollout(True, max_batch_tokens=64)}
    if not bench.rehearsal:  # which has no graphs
        others |= {
            "three at a time": rollout(True, max_sequences=3),
            "without graphs": rollout(False),
        }
    for name, other in others.items():
        tokens, again = (
            torch.tensor([t for c in found for t in c.token_ids]) for found in (other, completions)
        )
        compared(case, f"{name}: tokens", tokens, again)
        compared(
            case,
            f"{name}: log-probabilities",
            torch.cat([torch.tensor(c.logprobs) for c in other]),
            recorded,
        )
    if preset != "bf16":
        compared(
            case,
            "a learner in BF16",
            learned(model.under("bf16"), completions),
            recorded,
            "different",
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.sync()
    compared(case, "other weights", learned(model, completions), recorded, "different")


def _cublas(case: Case, bench: Bench) -> None:
    """A record, not a claim: how many elements of cuBLAS's products have other bits than Triton's,
    and how far off."""
    sizes = (
        ((5, 40, 256),)
        if bench.rehearsal
        else ((4, 1024, 1024), (64, 4096, 1024), (4096, 4096, 4096))
    )
    for rows, outputs, inputs in sizes:
        for kind in ("fp8", "bf16"):
            a, b = operands(kind, rows, outputs, inputs, get_ops("triton"))
            what = f"{kind}, {rows} x {outputs} x {inputs}"
            ours = product_module.product(a, b, None, torch.float32)
            if bench.rehearsal:
                compared(case, what, ours, ours, None)
            elif not takes(a, b, torch.float32):
                case.row(what, why="cuBLAS does not take it")
            else:
                with case.attempt(what):
                    compared(case, what, cublas_product(a, b, None, torch.float32), ours, None)
