"""What the native operators promise beyond their values: a row's bits depend on the row, the
weights and the position.

Rows alone and in batches of every awkward size, in another order, on one thread and on two;
decoding against prefill in one piece and in chunks; weights that change under their packs; and what
happens where nothing can be compiled.
"""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import KVStore, Layout, Operand, Ops, Packed, get_ops, tensors_of
from isobit.kernels.cache import CacheUnusable
from isobit.kernels.native import available, build, recipe
from isobit.precision import BF16, E4M3, FP32, INT8, QuantSpec, quantize

from .helpers import same, threads

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

ROWS = (1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 128, 257)
INNER, COLUMNS = 320, 112
CACHES = {
    "bf16": None,
    "e4m3": QuantSpec(E4M3, "row"),
    "int8": QuantSpec(INT8, "row", "fp32"),
    "fp32": None,
}


@pytest.fixture(scope="module", params=["bitwise", "exact"])
def native(request: pytest.FixtureRequest) -> Ops:
    return get_ops("native", request.param)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(21)


@pytest.fixture
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


def row_operators(
    ops: Ops, random: torch.Generator
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Operators as functions of rows [M, INNER] in bfloat16 and the rows' identities [M]; one
    output each."""
    spec = QuantSpec(E4M3, "1x128")
    weight = torch.randn(COLUMNS, INNER, generator=random)
    vector = torch.randn(INNER, generator=random).bfloat16()
    quantized = quantize(weight, QuantSpec(E4M3, "128x128"))
    table = torch.randn(300, INNER // 2, generator=random)
    zeros = torch.zeros(1, dtype=torch.int64)
    return {
        "fp8 product": lambda x, _: ops.product(
            ops.quantize(x, spec), quantized, None, torch.float32
        ),
        "bf16 product": lambda x, _: ops.product(x, weight.bfloat16(), None, torch.float32),
        "fp32 product": lambda x, _: ops.product(x.float(), weight, None, torch.float32),
        "quantize": lambda x, _: ops.quantize(x, spec).data.view(torch.uint8),
        "rms_norm": lambda x, _: ops.rms_norm(x, vector, 1e-5, x.flip(1))[0],
        "rms_norm_backward": lambda x, _: ops.rms_norm_backward(
            x, x.flip(1), vector, x[:, 0].float().abs()
        )[0],
        "rotary": lambda x, row: ops.rotary(x.unsqueeze(1), table, table.flip(0), row).squeeze(1),
        "gate_mul": lambda x, _: ops.gate_mul("silu", x),
        "gate_mul_backward": lambda x, _: ops.gate_mul_backward(
            "silu", x[:, : INNER // 2], x.flip(1)
        ),
        "logprob": lambda x, row: ops.token_logprobs(x.float(), row % INNER, 0.7)[0],
        "entropy": lambda x, row: ops.token_logprobs(x.float(), row % INNER, 0.7)[1],
        "sample": lambda x, row: ops.sample(
            x.float(), torch.stack([row, zeros.expand_as(row), row, row], 1), 1.0
        ),
    }


@pytest.mark.parametrize("count", [1, 2])
def test_a_row_is_the_same_in_every_batch(native: Ops, random: torch.Generator, count: int) -> None:
    x = (torch.randn(257, INNER, generator=random) * 3).bfloat16()
    identity = torch.arange(257)
    for name, operator in row_operators(native, random).items():
        with threads(1):
            alone = torch.cat([operator(x[i : i + 1], identity[i : i + 1]) for i in range(257)])
        with threads(count):
            for rows in ROWS:
                chosen = torch.randperm(257, generator=random)[:rows]
                assert same(operator(x[chosen], identity[chosen]), alone[chosen]), (name, rows)


def test_one_scale_for_the_batch_is_noticed(native: Ops, random: torch.Generator) -> None:
    """The negative control of the test above."""
    x = torch.randn(33, INNER, generator=random).bfloat16()
    w = quantize(torch.randn(COLUMNS, INNER, generator=random), QuantSpec(E4M3, "128x128"))
    spec = QuantSpec(E4M3, "tensor", "fp32")
    whole = native.product(native.quantize(x, spec), w)
    alone = torch.cat([native.product(native.quantize(x[i : i + 1], spec), w) for i in range(33)])
    assert not same(whole, alone)


def attention_inputs(
    random: torch.Generator, rows: int, cache: str
) -> tuple[Tensor, Tensor, Tensor, Callable[[int], KVStore]]:
    compute = FP32 if cache == "fp32" else BF16
    q, k, v = (
        torch.randn(rows, heads, 48, generator=random).to(compute.dtype) for heads in (6, 2, 2)
    )
    return q, k, v, lambda slots: KVStore.allocate(slots, 2, 48, CACHES[cache], compute)


@pytest.mark.parametrize("cache", CACHES)
def test_decoding_chunks_and_packed_rows_agree(
    native: Ops, random: torch.Generator, cache: str, two_threads
) -> None:
    lengths = [1, 90, 17, 33, 150]
    rows, starts = sum(lengths), [0, 1, 91, 108, 141]
    q, k, v, allocate = attention_inputs(random, rows, cache)
    packed = Layout.packed(lengths)
    store = allocate(packed.num_slots)
    native.kv_write(store, k, v, packed)
    out, lse = native.attention(q, store, packed, 0.2)
    for page_size, chunks in ((16, [1]), (4, [7, 1, 30]), (1, [64]), (16, [33, 90])):
        pages = -(-max(lengths) // page_size)
        table = torch.randperm(pages * len(lengths), generator=random).view(len(lengths), pages)
        paged, done = allocate(table.numel() * page_size), [0] * len(lengths)
        step = 0
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            live = [s for s in range(len(lengths)) if done[s] < lengths[s]]
            live = [live[i] for i in torch.randperm(len(live), generator=random).tolist()]
            counts = [min(chunks[(step + s) % len(chunks)], lengths[s] - done[s]) for s in live]
            chosen = torch.cat([torch.arange(starts[s] + done[s], starts[s] + done[s] + n)
                                for s, n in zip(live, counts, strict=True)])  # fmt: skip
            layout = Layout.build(counts, [done[s] for s in live], table[live].int(), page_size)
            native.kv_write(paged, k[chosen], v[chosen], layout)
            part, part_lse = native.attention(q[chosen], paged, layout, 0.2)
            assert same(part, out[chosen]), (page_size, chunks, step)
            assert same(part_lse, lse[chosen])
            done = [d + (counts[live.index(s)] if s in live else 0) for s, d in enumerate(done)]
            step += 1


def test_a_key_that_changes_is_noticed(native: Ops, random: torch.Generator) -> None:
    """The negative control of the test above: one bit of one key, and later rows differ, earlier
    ones do not."""
    q, k, v, allocate = attention_inputs(random, 40, "bf16")
    layout = Layout.packed([40])
    outs = []
    for _ in range(2):
        store = allocate(layout.num_slots)
        native.kv_write(store, k, v, layout)
        outs.append(native.attention(q, store, layout, 0.2)[0])
        k = k.clone()
        k[20] *= 1.01
    assert same(outs[0][:20], outs[1][:20])
    assert not same(outs[0][20:], outs[1][20:])


@pytest.mark.parametrize("cache", CACHES)
def test_gradients_of_a_sequence_do_not_depend_on_the_others(
    native: Ops, random: torch.Generator, cache: str, two_threads
) -> None:
    lengths = [50, 1, 33, 90]
    q, k, v, allocate = attention_inputs(random, sum(lengths), cache)
    dout = torch.randn(q.shape, generator=random).to(q.dtype)

    def gradients(rows: Tensor, parts: list[int]) -> list[Tensor]:
        layout = Layout.packed(parts)
        store = allocate(layout.num_slots)
        native.kv_write(store, k[rows], v[rows], layout)
        out, lse = native.attention(q[rows], store, layout, 0.2)
        return list(native.attention_backward(dout[rows], q[rows], out, lse, store, layout, 0.2))

    together = gradients(torch.arange(sum(lengths)), lengths)
    for start, length in zip([0, 50, 51, 84], lengths, strict=True):
        rows = torch.arange(start, start + length)
        for whole, alone in zip(together, gradients(rows, [length]), strict=True):
            assert same(whole[rows], alone)


@pytest.mark.parametrize("consistency", ["exact", "bitwise", "fast"])
@pytest.mark.parametrize("kind", ["e4m3", "bf16", "fp32"])
def test_a_prepared_weight_is_multiplied_as_it_was_when_it_was_prepared(
    random: torch.Generator, kind: str, consistency: str
) -> None:
    """Its products are those of the weight; once that is overwritten, the old pack gives the old
    products, which is the control, and the same pack written again the new ones, without new
    storage."""
    ops = get_ops("native", consistency)
    first, second = (torch.randn(COLUMNS, INNER, generator=random) for _ in range(2))
    x = torch.randn(5, INNER, generator=random)

    def operands(weight: Tensor) -> tuple[Operand, Operand]:
        if kind == "e4m3":
            return quantize(x, QuantSpec(E4M3, "1x128")), quantize(
                weight, QuantSpec(E4M3, "128x128", "fp32")
            )
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
        return x.to(dtype), weight.to(dtype, copy=True)

    (a, weight), (_, other) = operands(first), operands(second)
    prepared = ops.prepare(weight)
    before = ops.product(a, weight, None, torch.float32)
    assert same(ops.product(a, prepared, None, torch.float32), before)
    for target, source in zip(tensors_of(weight), tensors_of(other)):
        target.copy_(source)
    wanted = ops.product(a, other, None, torch.float32)
    assert not same(wanted, before)
    assert same(ops.product(a, weight, None, torch.float32), wanted)
    if isinstance(prepared, Packed):
        assert not same(ops.product(a, prepared, None, torch.float32), wanted), (
            "or this does not test what it says"
        )
    assert ops.prepare(weight, prepared) is prepared
    assert same(ops.product(a, prepared, None, torch.float32), wanted)
    assert isinstance(prepared, Packed) or (kind, consistency) == ("fp32", "fast")


def test_new_weights_at_an_old_address(native: Ops, random: torch.Generator) -> None:
    """Requantizing frees a weight and may reuse its memory and even its identity: each product is
    of its own weight."""
    x = native.quantize(torch.randn(3, INNER, generator=random), QuantSpec(E4M3, "1x128"))
    reference, addresses = get_ops("reference", native.consistency), set()
    for _ in range(50):
        weight = native.quantize(
            torch.randn(COLUMNS, INNER, generator=random), QuantSpec(E4M3, "128x128")
        )
        addresses.add((id(weight.data), weight.data.data_ptr()))
        found = native.product(x, weight, None, torch.float32)
        assert same(found, reference.product(x, weight, None, torch.float32))
        del weight
    assert len(addresses) < 50  # or this did not test what it says


@pytest.mark.slow
def test_no_compiler_is_a_reason_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = (
        "from isobit.kernels import get_ops; from isobit.kernels.native import available; "
        "print(available());print(get_ops('auto').why); get_ops('native')"
    )
    broken = tmp_path / "broken"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho "x.cpp:1: error: '
        'no" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    for program, expected in (
        ("/bin/false", "/bin/false --version failed"),
        (str(broken), "error: no"),
        ("none", "CXX=none"),
    ):
        source = str(Path(__file__).parents[2] / "src")
        environment = os.environ | {
            "CXX": program,
            "ISOBIT_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": source,
        }
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.startswith("(False, ")
        assert expected in done.stdout
        assert "reference backend, because native cannot be built" in done.stdout
        assert done.stderr.count("without them PyTorch computes, many times as slowly") == 1
        assert IsobitError.__name__ in done.stderr.splitlines()[-1]
        assert not list((tmp_path / "cache").rglob("*.so"))


def test_the_cache_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "mine"))
    folder = build.cache_directory("native")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(CacheUnusable, match="can be written by others"):
        build.cache_directory("native")
    with pytest.raises(IsobitError, match="can be written by others"):
        build._opened.__wrapped__()


@pytest.mark.slow
def test_processes_may_build_at_once_and_portable_code_agrees(
    tmp_path: Path, random: torch.Generator
) -> None:
    """Three builds into one empty cache, one of them without intrinsics: all load, and agree."""
    script = (
        "import sys, torch; from isobit.kernels import get_ops, KVStore, Layout; from "
        "isobit.precision import *;torch.manual_seed(3); ops = get_ops('native'); x = "
        "torch.randn(33, 512);a, w = ops.quantize(x, QuantSpec()), ops.quantize(torch.randn(64, "
        "512), QuantSpec(E4M3, '128x128'));layout = Layout.packed([20, 13]); store = "
        "KVStore.allocate(48, 2, 64, QuantSpec(E4M3, 'row'), BF16);q = x.view(33, 8, "
        "64).bfloat16(); ops.kv_write(store, q[:, :2], q[:, 2:4], layout);out = [ops.product(a, "
        "w, None, torch.float32), ops.product(x, x, None, "
        "torch.float32), ops.attention(q, store, layout, 0.1)[0], ops.gate_mul('silu', x), "
        "ops.rms_norm(x, x[0], 1e-5)[0], ops.token_logprobs(x, torch.arange(33), 1.0)[0], "
        "ops.sample(x, torch.arange(132).view(33, 4), 1.0), "
        "a.data.view(torch.uint8)];torch.save(out, sys.argv[1])"
    )
    source = str(Path(__file__).parents[2] / "src")
    running = []
    for index in range(3):
        flags = " ".join(("-O0", *recipe.WARNINGS, *(["-DISOBIT_PORTABLE"] if index % 2 else [])))
        environment = os.environ | {
            "ISOBIT_CACHE": str(tmp_path),
            "ISOBIT_CXXFLAGS": flags,
            "PYTHONPATH": source,
        }
        command = [sys.executable, "-c", script, str(tmp_path / f"{index}.pt")]
        running.append(subprocess.Popen(command, env=environment))
    assert [process.wait() for process in running] == [0] * 3
    assert len(list(tmp_path.rglob("*.so"))) == 2
    results = [torch.load(tmp_path / f"{index}.pt", weights_only=True) for index in range(3)]
    for index, result in enumerate(results):
        for place, (ours, first) in enumerate(zip(result, results[0], strict=True)):
            fused_matters = (
                index % 2 and place == 5
            )  # what is float64 there; float32 is fused everywhere
            assert (
                torch.allclose(ours.float(), first.float(), rtol=1e-2)
                if fused_matters
                else same(ours, first)
            ), place
