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
from isobit.kernels import Divided, Layout, Ops, Scoring, get_ops, tensors_of
from isobit.kernels.backends.rows import RowOps
from isobit.model import Experts
from isobit.model.adapters.targets import NewAdapter
from isobit.model.divided.by_rows import layout_of, model_by_rows, rollout_model
from isobit.model.divided.experts import ExpertsOfRanks
from isobit.model.hub.latent import Latent
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.keeping import KeptWeights
from isobit.precision import E4M3, QuantSpec, precision_from
from tests.distributed.threads import ThreadRanks, run
from tests.models import slow_where, tiny_model

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
MIXED = {"hidden_size": 384, "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
"""Three heads of keys: two ranks have one and two."""
EXPERTS, SCORING = Experts(7, 3, 128, dense_layers=(0,)), Scoring(2, 1, 1.7)
"""Seven experts of one block, so whole ones: two ranks have three and four."""
BY_ROWS = replace(EXPERTS, count=4, intermediate_size=384)
"""Of three blocks: two and three ranks have some rows of each."""
SCORED = replace(BY_ROWS, count=8, shared=384, scoring=SCORING)
LATENT = {"num_heads": 12, "num_kv_heads": 12, "head_dim": 96}
"""Three parts of four heads of 96, the fewest whose rows are whole blocks."""
LINEAR = LinearAttention((0,), 6, 12, 64, 64)
KINDS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "dense": ("qwen3", False, {}),
    "tied": ("qwen3", True, {}),
    "biased": ("qwen2", False, {}),
    "even": ("qwen3", False, {"intermediate_size": 512}),
    "experts": ("qwen3_moe", False, {**MIXED, "experts": EXPERTS}),
    "experts by rows": ("qwen3_moe", False, {**MIXED, "experts": BY_ROWS}),
    "scored": ("glm4_moe", False, {**MIXED, "experts": replace(SCORED, intermediate_size=128)}),
    "scored by rows": ("glm4_moe", False, {**MIXED, "experts": SCORED}),
    "biases and sinks": ("gpt_oss", False, {**MIXED, "experts": Experts(7, 2, 640)}),
    "latent": (
        "deepseek_v3", False,
        {**LATENT, "latent": Latent(128, 64, 32, 64, 256), "experts": SCORED},
    ),
    "latent, whole queries": (
        "deepseek_v3", False, {**LATENT, "latent": Latent(128, 64, 32, 64), "experts": SCORED},
    ),
    "linear": ("qwen3_5_text", False, {**MIXED, "linear": LINEAR}),
    "linear by head": (
        "qwen3_next", False,
        {**MIXED, "linear": replace(LINEAR, by_head=True), "experts": replace(BY_ROWS, shared=384)},
    ),
}  # fmt: skip


ADAPTED = " with an adapter"


@cache
def model_of(kind: str, precision: str, backend: str = "auto") -> Model:
    family, tied, changes = KINDS[kind.removesuffix(ADAPTED)]
    model = tiny_model(
        precision, family, 3, ALPHABET, backend, 3.0, tie_embeddings=tied, **{**SIZES, **changes}
    )
    return with_adapter(model) if kind.endswith(ADAPTED) else model


def with_adapter(base: Model) -> Model:
    """One of every matrix that may have one, as after an update: B is not 0."""
    model, random = base.adapted(NewAdapter(4, 16.0, seed=5)), torch.Generator().manual_seed(6)
    shards, own = model.transformer.masters.shards, model.named_parameters()
    for name, shape in shards.shapes.items():
        drawn = torch.randn(shape, generator=random)
        if name.endswith("lora_B") and name in own:
            own[name].data.copy_(drawn[slice(*shards.own(name))])
    model.sync()
    return model


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


PRESETS = ("fp8", "fp8-unified", "mxfp8", "bf16", "float32")
OTHERS = list(KINDS)[4:]
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
    *((kind, "fp8", 2) for kind in OTHERS),
    *((kind + ADAPTED, "fp8", 3) for kind in ("dense", "experts", "latent")),
    *slow_where(
        [(kind, preset, 3) for kind in OTHERS for preset in PRESETS]
        + [(kind + ADAPTED, preset, 2) for kind in KINDS for preset in ("fp8", "bf16")],
        lambda *_: True,
    ),
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
    monkeypatch.setitem(KINDS, family, (family, False, {}))
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
    gathered = RowOps.gathered

    def reversed_(ops: RowOps, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        found = gathered(ops, x, counts)
        return found[::-1] if len({len(each) for each in found}) == 1 else found

    monkeypatch.setattr(RowOps, "gathered", reversed_)
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


UNDIVIDED = {
    "olmo3": "a norm across all heads",
    "minimax_m2": "a norm across all heads",
    "nemotron_h": "Mamba-2 layers, the rows of whose steps are less than a block",
    "gemma4_text": "heads that differ by layer",
}


@pytest.mark.parametrize("family", UNDIVIDED)
def test_what_is_not_divided_is_refused(family: str) -> None:
    config = tiny_model("bf16", family).config
    message = f"^{family}: ranks do not hold a model together that has {UNDIVIDED[family]}$"
    with pytest.raises(IsobitError, match=message):
        layout_of(config, 2)


@pytest.mark.parametrize("changes", [{"embedded": 8}, {"reading": 1}])
def test_embeddings_of_layers_are_refused(changes: dict[str, int]) -> None:
    """Their table is whole, and would be read as rows of one that ranks divide; keys that other
    layers read. The control is the model without them."""
    config = replace(tiny_model("bf16").config, family="gemma4_text")
    layout_of(config, 2)
    config = replace(config, inputs=replace(config.inputs, **changes))
    with pytest.raises(IsobitError, match=r"embeddings of layers, or layers that read the keys"):
        layout_of(config, 2)


HEADS = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": 4}
TOO_MANY = {
    "experts": (
        4,
        {**HEADS, "experts": replace(EXPERTS, count=3)},
        "experts.0.gate_up has 3 parts",
    ),
    "latent": (4, {}, r"layers\.0\.q_b has 3 parts, so choose 3 at most"),
    "linear": (4, {}, r"layers\.0\.qkv has 3 parts, so choose 3 at most"),
}


@pytest.mark.parametrize("kind", TOO_MANY)
def test_more_ranks_than_parts_are_refused(kind: str) -> None:
    """Of experts, heads of latents and of linear attention. The control: as many can."""
    size, changes, message = TOO_MANY[kind]
    config = replace(model_of(kind, "bf16").config, **changes)
    with pytest.raises(IsobitError, match=message):
        layout_of(config, size).check(precision_from("bf16"))
    layout_of(config, size - 1).check(precision_from("bf16"))


def test_rows_of_an_expert_that_share_a_scale_are_refused() -> None:
    """A rank would quantize other rows together than one alone. The control: a dense model, whose
    rows are those of every rank."""
    precision = precision_from("fp8[activation_granularity=128x128]")
    layout_of(model_of("dense", "bf16").config, 2).check(precision)
    with pytest.raises(IsobitError, match="a scale of several rows of an expert"):
        layout_of(model_of("experts", "bf16").config, 2).check(precision)


def test_several_adapters_at_once_are_refused() -> None:
    whole = model_of("dense", "bf16")
    serving = Model(whole.transformer.serving({}), whole.tokenizer)
    with pytest.raises(IsobitError, match="together do not serve several adapters"):
        run(2, lambda ranks: model_by_rows(serving, ranks))


def test_an_adapter_changes_what_is_drawn() -> None:
    """The control of those with adapters, whose factors would else be left out on all sides."""
    assert alone("dense" + ADAPTED, "fp8")["drawn"] != alone("dense", "fp8")["drawn"]


SYNCED = ("experts", "experts by rows", "biases and sinks", "latent, whole queries", "linear")
SYNCED += ("dense" + ADAPTED, "experts" + ADAPTED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SYNCED)
@pytest.mark.parametrize("size", [2, 3])
def test_a_sync_reaches_all_that_is_multiplied(kind: str, size: int, tmp_path: Path) -> None:
    """Of a model that ranks hold together: rows, and a rank's share of what each has whole. The
    control: bits before the sync."""
    model_of(kind.removesuffix(ADAPTED), "bf16").save(tmp_path)

    def synced(ranks: Ranks) -> list[dict[str, str]]:
        model = Model.load(tmp_path, "fp8", ranks=ranks, divided=ranks.size)
        model = with_adapter(model) if kind.endswith(ADAPTED) else model
        before = bits(rollout_model(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0625).add_(0.01)
        model.sync()
        return [before, bits(rollout_model(model))]

    wanted = synced(ALONE)
    assert wanted[0] != wanted[1]
    assert run(size, synced) == [wanted] * size


@pytest.mark.parametrize("kind", ["biases and sinks", "dense" + ADAPTED])
def test_weights_that_were_kept_are_put_back(kind: str, tmp_path: Path) -> None:
    """Shares too, of what is whole on each rank."""
    model_of(kind.removesuffix(ADAPTED), "bf16").save(tmp_path)

    def put_back(ranks: Ranks) -> bool:
        model = Model.load(tmp_path, "bf16", ranks=ranks, divided=ranks.size)
        model = with_adapter(model) if kind.endswith(ADAPTED) else model
        rows = [[3, 4, 5, 300]]
        before, kept = read(model, rows), KeptWeights(model.transformer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0625).add_(0.01)
        model.sync()
        moved = read(model, rows)
        kept.put_back()
        return torch.equal(read(model, rows), before) and not torch.equal(moved, before)

    assert run(2, put_back) == [True, True]


def read(model: Model, rows: list[list[int]]) -> Tensor:
    return rollout_model(model).logprobs(rows, use="rollout")[0]


@pytest.mark.parametrize("kind", ["experts", "experts by rows"])
def test_another_order_of_slots_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of a token's sum over its slots, in float32: the last is added first."""

    def hidden(ranks: Ranks) -> list[float]:
        model = model_by_rows(model_of(kind, "float32"), ranks)
        rows = torch.tensor([300, 4, 5, 400])
        return model.transformer.hidden(rows, Layout.packed([4]), use="rollout").flatten().tolist()

    def summed(own: ExpertsOfRanks, x: Tensor, gates: Tensor, chosen: Tensor, *rest: Any) -> Tensor:
        slots = chosen.shape[1]
        shares = [through(own, x, gates[:, [k]], chosen[:, [k]], *rest) for k in range(slots)]
        return sum(shares[::-1], torch.zeros_like(x))

    assert run(2, hidden) == [hidden(ALONE)] * 2
    through = ExpertsOfRanks.through
    monkeypatch.setattr(ExpertsOfRanks, "through", summed)
    found = run(2, hidden)
    monkeypatch.undo()
    assert found[0] == found[1] != hidden(ALONE)


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


def codes(columns: int) -> int:
    """Bytes of a row in E4M3, with a float32 scale for each block."""
    return columns + 4 * -(-columns // 128)


def formula(kind: str) -> int:
    """Bytes of a token in both layers, of which each rank has its share and receives the rest."""
    config = model_of(kind, "fp8").config
    hidden, experts, total = 2 * config.hidden_size, config.experts, 0
    for layer in range(config.num_layers):
        value = config.head_dim if config.latent is None else config.latent.value
        linear = config.linear if config.is_linear(layer) else None
        total += codes(config.num_heads * value if linear is None else linear.values) + hidden
        if experts is None or not config.is_mixture(layer):
            total += codes(config.inner_of(layer)) + hidden
            continue
        by_rows = experts.intermediate_size >= 256
        inner, slots = codes(experts.intermediate_size), experts.per_token
        total += slots * inner + hidden if by_rows else slots * hidden
        total += codes(experts.shared) + hidden if experts.shared else 0
    return total


@pytest.mark.parametrize("kind", list(KINDS))
def test_bytes_that_travel_are_those_of_the_formula(kind: str) -> None:
    """Of a token and layer: codes and scales before `o` and `down`, of every expert of a token where
    ranks have rows of each, and BF16 columns behind them; where ranks have whole experts, a row for
    every slot. Of the embedding a row from each rank, of the head its logits in float32."""

    def received(ranks: Ranks) -> int:
        model = model_by_rows(model_of(kind, "fp8"), ranks)
        model.logprobs([[3, 4, 5, 6, 7]], use="rollout")
        return cast(RowOps, model.transformer.ops["rollout"]).bytes_received

    rows, size, config = 4, 2, model_of(kind, "fp8").config  # behind the last token is nothing
    embedding = size * 2 * config.hidden_size
    wanted = rows * (size - 1) * (formula(kind) + embedding + 4 * config.vocab_size)
    assert sum(run(size, received)) == wanted


TOGETHER = """
import json, sys
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from isobit.distributed.transport import TorchRanks
from tests.distributed.test_by_rows import by_rows

rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ranks = TorchRanks(dist.FileStore(path, size), rank, size, torch.device("cpu"), 60)
print(json.dumps({kind: by_rows(kind, "fp8", ranks) for kind in sys.argv[4:]}))
ranks.close()
"""


@pytest.mark.slow
def test_processes_together_have_the_bits_of_one(tmp_path: Path) -> None:
    """Over gloo, of three, whose shares are uneven."""
    kinds = "dense", "experts", "experts by rows", "latent", "linear", "experts" + ADAPTED
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(rank), "3", str(tmp_path / "store"), *kinds],
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(3)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    wanted = {kind: alone(kind, "fp8") for kind in kinds}
    assert [json.loads(text) for text in said] == [wanted] * 3


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

    def in_turns(ranks: ThreadRanks, what: str, *given: Any) -> list[Any]:
        turn.release()
        try:
            return everyone(ranks, what, *given)
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
