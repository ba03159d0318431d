"""The planner's bytes: to the byte those of models, caches and optimizers, and those of the
design's table."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.plan_jobs import MODELS, job
from isobit.config.sections import AdapterConfig
from isobit.distributed import Ranks
from isobit.distributed.shards import ownership
from isobit.engine.engine import Engine
from isobit.model import Experts, Model, ModelConfig
from isobit.model.hub.shapes import parameter_shapes
from isobit.precision import PRESETS
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.training.plan import plan
from isobit.training.plan.memory import (
    gradient_bucket,
    largest_share,
    least,
    num_parameters,
    state_bytes,
)
from isobit.training.plan.meta import (
    Described,
    _fewer_layers,
    divided_bytes,
    page_bytes,
    weight_bytes,
)
from tests.distributed.threads import run
from tests.models import tiny_model

FLOWS = (
    "float32",
    "bf16",
    "fp8",
    "fp8-unified",
    "fp8-rollout",
    "fp8-e2e",
    "mxfp8",
    "nvfp4",
    "fp8[bf16_first_layers=1]",
    "fp8[bf16_layers=[o, down]]",
    "fp8[learner={kv_cache: bf16}]",
    "fp8[kv_cache=e4m3]",
    "bf16[engines=separate]",
)


@pytest.mark.parametrize(
    ("name", "by_ranks"),
    [
        ("Qwen3-8B", {1: 141, 8: 27, 16: 18}),
        ("Qwen3-32B", {1: 561, 8: 102, 16: 69}),
        ("Qwen3-30B-A3B", {1: 522, 8: 95, 16: 64}),
        ("Llama-3.1-70B", {1: 1206, 8: 217, 16: 147, 64: 94}),
    ],
)
def test_what_is_held_and_a_layers_gradient_are_the_designs(
    name: str, by_ranks: dict[int, int]
) -> None:
    """In GB, to 3 %: working weights, 16 bytes a parameter divided among the ranks, one layer's
    gradients."""
    config = MODELS[name]
    weights, wide = (
        weight_bytes(Described(config, PRESETS[flow])).total for flow in ("fp8", "bf16")
    )
    for ranks, gigabytes in by_ranks.items():
        found = weights + 16 * largest_share(config, ranks) + gradient_bucket(config)
        assert found / 1e9 == pytest.approx(gigabytes, rel=0.03)
        # the control: with BF16 working weights it is another number
        assert (found + wide - weights) / 1e9 != pytest.approx(gigabytes, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "gigabytes", "saved"),
    [
        ("Qwen3-8B", 8, 19.2, 6.8),
        ("Qwen3-32B", 8, 72.6, 28.3),
        ("Qwen3-32B", 64, 15.1, 28.3),
        ("Llama-3.1-70B", 8, 154.4, 61.6),
        ("Llama-3.1-70B", 64, 30.8, 61.6),
    ],
)
def test_what_eight_ranks_hold_together_is_the_designs(
    name: str, ranks: int, gigabytes: float, saved: float
) -> None:
    """In GB, to 10 %: masters, moments, gradients, rows of the working weights, and what is open in
    the learner; and what is saved of all. The control holds them by two ranks."""
    changes = "optimizer.micro_batch_tokens=16384", "optimizer.activation_checkpointing=true"
    whole = job(name, *changes, "engine.sleep=always", ranks=ranks)
    opened = divided_bytes(Described(whole.model, whole.precision), 8)[1]
    gradients = 4 * largest_share(whole.model, ranks)
    given = whole.together(8)
    planned = sum(size for _, size in plan(given).held) + gradients + opened
    assert planned / 1e9 == pytest.approx(gigabytes, rel=0.1)

    def learning(size: int) -> int:
        found = plan(whole.together(size))
        return sum(size for _, size in found.held) + found.parts[0][1]

    less = {size: learning(1) - learning(size) for size in (2, 8)}
    assert less[8] / 1e9 == pytest.approx(saved, rel=0.1)
    assert less[2] / 1e9 != pytest.approx(saved, rel=0.1), "the control"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_rank_that_holds_a_model_with_others_has_these_bytes(family: str, tmp_path: Path) -> None:
    """Those of the rank with the most, to 2 %, of layers of which not all are made; of the cache
    half. The control is a model that is whole."""
    sizes = {"num_layers": 12, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    letters = "".join(chr(0x20000 + i) for i in range(500))  # embedding and head of several blocks
    heads = {"num_heads": 8, "num_kv_heads": 4}
    tiny_model("fp8", family, alphabet=letters, **heads, **sizes).save(tmp_path / "model")

    def held(ranks: Ranks) -> int:
        model = Model.load(tmp_path / "model", "fp8", ranks=ranks, divided=2)
        return model.memory()["rollout"]

    config = Model.load(tmp_path / "model", "fp8").config
    given = Described(config, PRESETS["fp8"], host=True, packs=True)
    planned, most = divided_bytes(given, 2)[0].rollout, max(run(2, held))
    assert planned == pytest.approx(most, rel=0.02)
    assert weight_bytes(given).rollout > 1.5 * most
    assert page_bytes(given, 16, 2) == page_bytes(given, 16) // 2


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen3_moe", "llama", "qwen2", "qwen3_5_text", "deepseek_v3"]
    + ["qwen3_next", "glm4_moe", "minimax_m2"]
    + ["gemma4_text-experts", "gemma4_text-small", "nemotron_h", "nemotron_h-latent"],
)
@pytest.mark.parametrize("flow", FLOWS)
def test_working_weights_have_these_bytes(flow: str, family: str) -> None:
    """No byte more or less, scales, routers and packs included; some matrices are no multiples of a
    block."""
    model = tiny_model(flow, family, hidden_size=160, intermediate_size=200)
    planned = weight_bytes(Described(model.config, model.precision, host=True, packs=True))
    held = model.memory()
    assert (planned.rollout, planned.learner) == (held["rollout"], held["learner"])
    assert planned.packs == model.transformer.packed_bytes() > 0
    assert 4 * num_parameters(model.config) == held["masters"]
    other = weight_bytes(Described(model.config, PRESETS["bf16" if flow != "bf16" else "fp8"]))
    assert other.rollout + other.learner != held["rollout"] + held["learner"], "the control"
    assert other.packs == 0


@pytest.mark.parametrize(
    ("flow", "family"),
    [("fp8", "qwen3"), ("fp8-e2e", "qwen3_moe"), ("fp8[bf16_last_layers=1]", "qwen3")],
)
def test_weights_of_many_layers_have_these_bytes(flow: str, family: str) -> None:
    """Layers of one kind are not all made. The control: where the last one differs, they are."""
    model = tiny_model(flow, family, num_layers=12)
    given = Described(model.config, model.precision, host=True, packs=True)
    assert (_fewer_layers(given) is None) == ("last" in flow)
    found, held = weight_bytes(given), model.memory()
    assert (found.rollout, found.learner) == (held["rollout"], held["learner"])
    assert found.packs == model.transformer.packed_bytes()


def test_mixtures_may_have_dense_layers() -> None:
    model = tiny_model("fp8", "qwen3_moe", experts=Experts(5, 2, 24, dense_layers=(1,)))
    assert (
        weight_bytes(Described(model.config, model.precision)).rollout == model.memory()["rollout"]
    )


def test_a_frozen_model_keeps_the_learners_weights() -> None:
    model = tiny_model("fp8-rollout")
    given = Described(model.config, model.precision, host=True, packs=True)
    model.transformer.freeze()
    frozen, whole = weight_bytes(given, frozen=True), weight_bytes(given)
    assert frozen.rollout == model.memory()["rollout"]
    assert frozen.learner == 0
    assert frozen.packs == model.transformer.packed_bytes()
    assert whole.rollout + whole.learner > 1.5 * model.memory()["rollout"]


@pytest.mark.parametrize(
    "family",
    ["qwen3", "gemma3_text", "gemma4_text", "gemma4_text-small", "qwen3_5_text", "nemotron_h"]
    + ["qwen3_next", "minimax_m2"],
)
@pytest.mark.parametrize(
    "flow", ["bf16", "fp8", "fp8-rollout-kv", "fp8[bf16_last_layers=1]", "float32"]
)
def test_the_cache_has_these_bytes(flow: str, family: str) -> None:
    engine = Engine(tiny_model(flow, family), kv_pages=64, page_size=16)
    found = page_bytes(Described(engine.model.config, engine.model.precision), 16)
    # a calibrated cache has one scale a layer, which no page has
    config = engine.model.config
    layers = sum(
        config.has_attention(layer) and not config.is_linear(layer)
        for layer in range(config.num_stores)
    )
    scales = 8 * layers if engine.model.precision.rollout.calibrated else 0
    assert 64 * (found - scales) + scales == engine.kv_bytes
    other = PRESETS["bf16" if flow != "bf16" else "fp8"]
    if family == "qwen3":
        assert 64 * page_bytes(Described(engine.model.config, other), 16) != pytest.approx(
            engine.kv_bytes, rel=0.05
        )


_GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
}
_E2B = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
}
_A4B = {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0,
}


@pytest.mark.parametrize(
    ("sizes", "billions", "stores"), [(_E2B, 4.65, 15), (_A4B, 25.2, 30)], ids=["E2B", "26B-A4B"]
)
def test_gemma_4_has_the_parameters_of_transformers(
    sizes: dict[str, Any], billions: float, stores: int
) -> None:
    """Each but the number by which a layer's sum is multiplied, which is a buffer there; and a token
    in the cache has the bytes of those layers that have keys of their own."""
    with torch.device("meta"):
        theirs = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**_GEMMA4 | sizes))
    config = ModelConfig.from_hf(_GEMMA4 | sizes)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    assert num_parameters(config) - config.num_layers == count
    assert count / 1e9 == pytest.approx(billions, rel=0.01)
    heads = [config.heads_of(layer) for layer in range(stores)]
    wanted = sum(2 * 2 * each.width for each in heads)
    assert page_bytes(Described(config, PRESETS["bf16"]), 1) == wanted


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_moments_have_these_bytes(state: str) -> None:
    """In 8 bits only parameters of 4,096 elements and more, in whole blocks of 256; embedding and
    head never."""
    model = tiny_model("fp8", hidden_size=160, intermediate_size=200)
    settings = OptimizerSettings(state=state)
    optimizer = ShardedOptimizer(model.named_parameters(), settings)
    shapes = parameter_shapes(model.config)
    assert state_bytes(shapes, settings) == optimizer.nbytes
    low, wide = (state_bytes(shapes, OptimizerSettings(state=each)) for each in ("8bit", "fp32"))
    assert low < wide
    muon = OptimizerSettings(name="muon")
    assert state_bytes(shapes, muon) == ShardedOptimizer.of(model, muon).nbytes < wide


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64, 128])
def test_shares_are_nearly_equal_and_cover_all(ranks: int) -> None:
    config = MODELS["Qwen3-8B"]
    share = largest_share(config, ranks)
    assert num_parameters(config) <= share * ranks <= 1.02 * num_parameters(config)
    small = ModelConfig(
        "llama", 256, 128, 256, 2, 2, 2, 64
    )  # of two or three blocks a matrix: they cannot be divided
    assert largest_share(small, 64) * 64 > 2 * num_parameters(small)
    assert largest_share(config, 1024) < 0.2 * largest_share(config, 128)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_shares_are_those_of_the_shards(ranks: int) -> None:
    config = MODELS["Qwen3-8B"]
    shapes, kept = parameter_shapes(config), [0] * ranks
    for name, rows in ownership(shapes, ranks).items():
        for rank, (low, high) in enumerate(rows):
            kept[rank] += (high - low) * math.prod(shapes[name][1:])
    assert largest_share(config, ranks) == max(kept) != largest_share(config, ranks + 1)


def test_one_gpu_trains_an_adapter_of_eight_billion_weights() -> None:
    """Before keys, values and activations 11 GB, where all weights take 140; its factors counted by
    hand."""

    def held(*changes: str) -> int:
        return least(job("Qwen3-8B", *changes))

    shapes = (
        (4096, 4096),
        (4096, 1024),
        (4096, 1024),
        (4096, 4096),
        (4096, 12288),
        (4096, 12288),
        (12288, 4096),
    )
    adapter = AdapterConfig(32)
    assert num_parameters(MODELS["Qwen3-8B"], adapter) == 36 * 32 * sum(map(sum, shapes))
    of_adapter = held("adapter.rank=32")
    assert 10.5e9 < of_adapter < 11.5e9
    assert 135e9 < held() < 145e9
    linear = num_parameters(MODELS["Qwen3-8B"]) - 2 * 151936 * 4096
    low = held("adapter.rank=32", "precision=nvfp4[activation=bf16]")
    assert of_adapter - low == pytest.approx((1 + 4 / 128**2 - 4.5 / 8) * linear, rel=1e-3)


def test_keys_change_the_parts_that_they_are_about() -> None:
    def parts(*changes: str, ranks: int = 8) -> dict[str, float]:
        found = plan(job("Qwen3-8B", *changes, ranks=ranks))
        return {label.partition(":")[0]: size for label, size in (*found.held, *found.parts)} | {
            "total": found.total
        }

    plain, config = parts(), MODELS["Qwen3-8B"]
    gradients = 4 * largest_share(config, 8)
    assert (
        parts("optimizer.activation_checkpointing=true")["learning"] - gradients
        < 0.35 * plain["learning"]
    )
    assert parts("optimizer.micro_batch_tokens=8192")["learning"] < 0.6 * plain["learning"]
    low = parts("optimizer.state=8bit")["AdamW moments"]
    outside = 2 * 151936 * 4096  # embedding and head, whose moments stay in 32 bits
    rest = num_parameters(config) - outside
    assert low == pytest.approx((8 * outside + 2 * rest) / 8, rel=0.03)
    assert plain["AdamW moments"] == pytest.approx(8 * (outside + rest) / 8, rel=0.01)
    frozen = weight_bytes(Described(config, PRESETS["fp8"]), frozen=True).total
    assert parts("algorithm.kl_coefficient=0.01")["reference, working weights only"] == frozen
    assert parts("precision=fp8-rollout")["working weights, learner"] == 2 * num_parameters(config)
    assert "working weights, learner" not in plain
    page = page_bytes(Described(config, PRESETS["fp8"]), 16)
    assert parts("engine.kv_pages=1000")["keys and values"] == 1000 * page
    asleep = parts("engine.sleep=always")
    assert "keys and values" not in asleep
    assert asleep["total"] < plain["total"]
    assert "keys and values of the evaluation" in parts("evaluation.every=10")
    assert parts(ranks=16)["FP32 masters"] == pytest.approx(plain["FP32 masters"] / 2, rel=0.01)
    assert parts("optimizer.masters=bf16")["BF16 masters"] == plain["FP32 masters"] / 2
    assert parts("precision=bf16")["total"] > plain["total"]
