"""A model that several ranks hold together, each some rows of every weight: tokens, their
log-probabilities and those of a forward have the bits of one rank alone, at any number of ranks."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from isobit import Engine, Model, Sampling
from isobit.distributed import ALONE, Ranks
from isobit.engine.group import GroupEngine
from isobit.errors import IsobitError
from isobit.kernels import Divided, Layout, Ops, get_ops, tensors_of
from isobit.kernels.backends.rows import RowOps
from isobit.model.divided.by_rows import layout_of, model_by_rows
from isobit.precision import E4M3, QuantSpec
from tests.distributed.threads import ThreadRanks, run
from tests.models import tiny_model

ALPHABET = "0123456789+-*=" + "".join(map(chr, range(0x4E00, 0x4E00 + 520)))
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 640,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 64,
}
"""Four parts of two heads, four blocks of the hidden size, five of the MLP and of the vocabulary,
whose last is not full: three ranks have uneven shares, and two and four of most."""
PROMPTS = ["1+1=", "12+34=", "9", "123456789+987654321="]
DENSE = {
    "dense": ("qwen3", False, {}),
    "tied": ("qwen3", True, {}),
    "biased": ("qwen2", False, {}),
    "even": ("qwen3", False, {"intermediate_size": 512}),
}


@cache
def model_of(kind: str, precision: str, backend: str = "auto") -> Model:
    family, tied, changes = DENSE[kind]
    return tiny_model(
        precision, family, 3, ALPHABET, backend, 3.0, tie_embeddings=tied, **{**SIZES, **changes}
    )


def bits(model: Model) -> dict[str, str]:
    """Digests of what is sampled with each kind of draw, and of a forward over it."""
    engine = Engine(model, kv_pages=64, max_batch_tokens=24, cuda_graphs=False)
    groups = engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=6, seed=3))
    filtered = Sampling(n=1, max_new_tokens=4, seed=4, temperature=0.7, top_p=0.9, top_k=5)
    groups += engine.generate(PROMPTS[:2], filtered)
    groups += engine.generate(PROMPTS[:2], Sampling(n=1, max_new_tokens=4, temperature=0.0))
    every = [completion for group in groups for completion in group]
    read = [[*c.prompt_token_ids, *c.token_ids] for c in every]
    drawn = b"".join(struct.pack(f"{len(c.logprobs)}d", *c.logprobs) for c in every)
    forward = b"".join(row.numpy().tobytes() for row in model.logprobs(read, use="rollout"))
    digests = {"tokens": repr(read).encode(), "drawn": drawn, "forward": forward}
    return {name: hashlib.sha256(data).hexdigest() for name, data in digests.items()}


@cache
def alone(kind: str, precision: str, backend: str = "auto") -> dict[str, str]:
    return bits(model_of(kind, precision, backend))


def poisoned(model: Model) -> None:
    """NaN in every working weight that is divided, where a copy of its rows is elsewhere now."""
    layout = layout_of(model.config, 1)
    for name, working, _ in model.transformer._working["rollout"].tensors():
        if layout.divided(name):
            for tensor in tensors_of(working):
                tensor.view(torch.uint8).fill_(0xFF)


def by_rows(kind: str, precision: str, ranks: Ranks, backend: str = "auto") -> dict[str, str]:
    """What a rank computes with its rows; the whole model is another one than `alone`'s."""
    whole = model_of.__wrapped__(kind, precision, backend)
    divided = model_by_rows(whole, ranks)
    poisoned(whole)
    return bits(divided)


MATRIX = [
    ("dense", "fp8", 2),
    ("dense", "fp8", 3),
    ("dense", "fp8", 4),
    ("tied", "fp8", 3),
    ("biased", "fp8", 2),
    ("dense", "bf16", 3),
    ("tied", "bf16", 2),
    ("dense", "mxfp8", 3),
    ("dense", "fp8-unified", 3),
    ("tied", "fp8-unified", 2),
]


@pytest.mark.parametrize(("kind", "precision", "size"), MATRIX)
def test_ranks_together_have_the_bits_of_one(kind: str, precision: str, size: int) -> None:
    """On every rank, which all draw the same; what a rank does not keep is NaN."""
    found = run(size, lambda ranks: by_rows(kind, precision, ranks))
    assert found == [alone(kind, precision)] * size


FAMILIES = (
    "gemma3_text", "glm4", "granite", "llama", "ministral3", "mistral", "phi3", "seed_oss", "smollm3"
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_dense_families_have_the_bits_of_one(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their scales, biases, norms behind a layer and rotations."""
    monkeypatch.setitem(DENSE, family, (family, False, {}))
    assert run(3, lambda ranks: by_rows(family, "fp8", ranks)) == [alone(family, "fp8")] * 3


def test_one_rank_is_a_group_too() -> None:
    assert by_rows("dense", "fp8", ALONE) == alone("dense", "fp8")


def even_forward(ranks: Ranks) -> list[float]:
    """Of ranks with equal shares: hidden states alone, since the vocabulary's are not."""
    model = model_by_rows(model_of("even", "fp8"), ranks)
    tokens = torch.tensor([300, 4, 5, 400])
    hidden = model.transformer.hidden(tokens, Layout.packed([4]), use="rollout")
    return hidden.float().flatten().tolist()


def test_ranks_in_reverse_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all that is gathered: equal shares, joined in another order."""
    gathered = RowOps._gathered

    def reversed_(ops: RowOps, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        found = gathered(ops, x, counts)
        return found[::-1] if len({len(each) for each in found}) == 1 else found

    monkeypatch.setattr(RowOps, "_gathered", reversed_)
    found = run(2, lambda ranks: even_forward(ranks))
    monkeypatch.undo()
    assert run(2, even_forward)[0] == even_forward(ALONE)
    assert found[0] != even_forward(ALONE)


REFUSED = {
    "fp8[activation_granularity=row]": "scale beyond 128 columns",
    "nvfp4": "scale of all rows",
    "fp8-rollout": "second engine",
}


@pytest.mark.parametrize("precision", REFUSED)
def test_scales_that_cross_ranks_are_refused(precision: str) -> None:
    """Before anything is computed. Where it was not refused, codes of some columns had other scales
    than among all."""
    whole = tiny_model(precision, "qwen3", 3, ALPHABET, **SIZES)
    with pytest.raises(IsobitError, match=REFUSED[precision]):
        run(2, lambda ranks: model_by_rows(whole, ranks))


def test_an_operand_whose_scales_cross_ranks_is_refused() -> None:
    """Also where nobody has asked the layout."""
    spec, weight = QuantSpec(E4M3, "row"), torch.randn(256, 256).bfloat16()
    ops = get_ops()

    def multiply(ranks: Ranks) -> Tensor:
        x = ops.quantize(torch.ones(2, 128).bfloat16(), spec)
        shard = Divided(weight[:128], None, whole_rows=256, operand=(128, 128), result=(128, 128))
        return cast(Ops, RowOps(ops, ranks, (0, 0))).product(x, shard)

    with pytest.raises(IsobitError, match="e4m3 row ue8m0, which has a scale beyond 128 columns"):
        run(2, multiply)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "olmo3", "qwen3_5_text", "gemma4_text"]
)
def test_what_is_not_divided_yet_is_refused(family: str) -> None:
    config = tiny_model("bf16", family).config
    with pytest.raises(IsobitError, match=f"^{config.family}: ranks hold a model together whose"):
        layout_of(config, 2)


def test_embeddings_of_layers_are_refused() -> None:
    """Their table is whole, and would be read as rows of one that ranks divide. The control is the
    model without them."""
    config = replace(tiny_model("bf16").config, family="gemma4_text")
    layout_of(config, 2)
    config = replace(config, inputs=replace(config.inputs, embedded=8))
    with pytest.raises(IsobitError, match=r"embeddings of layers$"):
        layout_of(config, 2)


def test_pages_are_those_of_the_rank_that_has_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules would part otherwise. The control: each alone takes what it has."""
    whole, room = model_of("dense", "bf16"), {0: 1 << 20, 1: 1 << 19}
    here = threading.local()
    monkeypatch.setattr(
        "isobit.engine.engine.most_cache_bytes", lambda device, reserved: room[here.rank]
    )

    def pages(ranks: Ranks, divided: bool) -> int:
        here.rank = ranks.rank
        model = model_by_rows(whole, ranks) if divided else whole
        return Engine.sized_for(model, ["1+1="] * 9, 50, 20).pages.num_pages

    together = run(2, lambda ranks: pages(ranks, True))
    apart = run(2, lambda ranks: pages(ranks, False))
    assert together[0] == together[1]
    assert apart[0] != apart[1]


def test_bytes_that_travel_are_those_of_the_formula() -> None:
    """Of a token and layer: codes and scales before `o` and `down`, BF16 columns behind them; of the
    embedding a row, of the head its logits in float32."""

    def received(ranks: Ranks) -> int:
        model = model_by_rows(model_of("dense", "fp8"), ranks)
        model.logprobs([[3, 4, 5, 6, 7]], use="rollout")
        return cast(RowOps, model.transformer.ops["rollout"]).bytes_received

    rows, layers = 4, 2  # behind the last token nothing is predicted
    inner_of = {0: 256, 1: 384}
    vocabulary = model_of("dense", "fp8").config.vocab_size
    for rank, found in enumerate(run(2, received)):
        heads, inner, hidden = 512, inner_of[1 - rank], 256
        codes = heads + heads // 128 * 4 + inner + inner // 128 * 4
        logits = vocabulary - 256 if rank == 0 else 256
        wanted = layers * (codes + 2 * 2 * hidden) + 2 * 512 + 4 * logits
        assert found == rows * wanted


TOGETHER = """
import json, sys
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from isobit.distributed.transport import TorchRanks
from tests.distributed.test_by_rows import by_rows

rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ranks = TorchRanks(dist.FileStore(path, size), rank, size, torch.device("cpu"), 60)
print(json.dumps(by_rows("dense", "fp8", ranks)))
ranks.close()
"""


@pytest.mark.slow
def test_processes_together_have_the_bits_of_one(tmp_path: Path) -> None:
    """Over gloo, of three, whose shares are uneven."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(rank), "3", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(3)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [json.loads(text) for text in said] == [alone("dense", "fp8")] * 3


def asked(engine: Engine | GroupEngine) -> list[tuple[list[int], list[float]]]:
    """Requests that come between steps, one of them cancelled, with settings that JSON must keep."""
    stop = Sampling(2, 9, temperature=0.9, top_k=7, seed=5, stop=("1", "=+"), stop_tokens=(3,))
    engine.submit(PROMPTS[0], Sampling(2, 8, seed=1))
    ended = engine.step()
    dropped = engine.submit(PROMPTS[3], Sampling(1, 30, seed=2))
    engine.submit([4, 5, 6], stop, prompt_id=7, sample_index=3)
    ended += engine.step()
    engine.cancel(dropped)
    engine.cancel(dropped)
    inner = engine.engine if isinstance(engine, GroupEngine) else engine
    while inner.num_open:
        ended += engine.step()
    return [(list(c.token_ids), list(c.logprobs)) for _, c in ended]


def test_the_first_rank_says_what_comes_from_outside() -> None:
    """Requests, their settings and cancellations; the others follow until it closes, with nothing
    open. A request that the first refuses is not said."""

    def serve(ranks: Ranks) -> list[tuple[list[int], list[float]]] | int:
        model = model_by_rows(model_of("dense", "fp8"), ranks)
        group = GroupEngine(Engine(model, kv_pages=64, max_batch_tokens=24))
        if not ranks.first:
            group.follow()
            return group.engine.num_open
        with pytest.raises(IsobitError, match="to leave room for an answer"):
            group.submit([4] * 64)
        found = asked(group)
        group.close()
        return found

    wanted = asked(Engine(model_of("dense", "fp8"), kv_pages=64, max_batch_tokens=24))
    assert len(wanted) == 4
    assert run(3, serve) == [wanted, 0, 0]


@pytest.mark.slow
def test_kernels_of_a_gpu_have_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, which one rank at a time uses: drawn tokens and log-probabilities, by
    the fused head, and a forward."""
    turn, everyone = threading.Lock(), ThreadRanks._all

    def in_turns(ranks: ThreadRanks, what: str, given: Any) -> list[Any]:
        turn.release()
        try:
            return everyone(ranks, what, given)
        finally:
            turn.acquire()

    def computed(ranks: Ranks) -> tuple[list[int], list[float], list[float]]:
        with turn if ranks.size > 1 else nullcontext():
            small = {"hidden_size": 256, "intermediate_size": 384, "num_heads": 4, "num_layers": 1}
            small |= {"num_kv_heads": 4, "head_dim": 64}
            whole = tiny_model("fp8", "qwen3", 3, ALPHABET[:300], "triton", 3.0, **small)
            model = model_by_rows(whole, ranks) if ranks.size > 1 else whole
            engine = Engine(model, kv_pages=8, cuda_graphs=False)
            ((drawn,),) = engine.generate(["1+1="], Sampling(1, 2, seed=3))
            (read,) = model.logprobs([[*drawn.prompt_token_ids, *drawn.token_ids]], use="rollout")
            return drawn.token_ids, drawn.logprobs, read.tolist()

    monkeypatch.setattr(ThreadRanks, "_all", in_turns)
    assert run(2, computed) == [computed(ALONE)] * 2
