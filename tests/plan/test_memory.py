"""The planner's bytes: those of the design's table, and those of real models, caches and moments."""

import math
from dataclasses import replace

import pytest

from benchmarks.plan_jobs import MODELS, job
from isobit.config.sections import AdapterConfig
from isobit.distributed.shards import ownership
from isobit.engine.engine import Engine
from isobit.model import Experts, ModelConfig
from isobit.model.hub.shapes import parameter_shapes
from isobit.plan.memory import (
    cache_bytes_of_a_token,
    gradient_bucket,
    largest_share,
    memory,
    moment_bytes,
    num_parameters,
    weights,
)
from isobit.precision import PRESETS, precision_from
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
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
def test_what_is_held_and_a_layers_gradient_are_the_designs(name: str, by_ranks: dict[int, int]) -> None:
    """In GB, to 3 %: working weights, 16 bytes a parameter divided among the ranks, one layer's gradients."""
    config = MODELS[name]
    for ranks, gigabytes in by_ranks.items():
        found = weights(config, PRESETS["fp8"]).total + 16 * largest_share(config, ranks) + gradient_bucket(config)
        assert found / 1e9 == pytest.approx(gigabytes, rel=0.03)
        # the control: with BF16 working weights it is another number
        other = found + weights(config, PRESETS["bf16"]).total - weights(config, PRESETS["fp8"]).total
        assert other / 1e9 != pytest.approx(gigabytes, rel=0.03)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "qwen2", "qwen3_5_text"])
@pytest.mark.parametrize("flow", FLOWS)
def test_working_weights_have_these_bytes(flow: str, family: str) -> None:
    """No byte more or less, scales and routers included; some matrices are no multiples of a block."""
    model = tiny_model(flow, family, hidden_size=160, intermediate_size=200)
    planned, held = weights(model.config, model.precision), model.memory()
    assert planned.total - planned.own == held["rollout"]
    assert planned.own == held["learner"]
    assert 4 * num_parameters(model.config) == held["masters"]
    assert (planned.router > 0) == (family in ("qwen3_moe", "qwen3_5_text"))
    other = "bf16" if flow != "bf16" else "fp8"  # the control
    assert weights(model.config, PRESETS[other]).total != sum(held.values()) - held["masters"]


def test_mixtures_may_have_dense_layers() -> None:
    model = tiny_model("fp8", "qwen3_moe", experts=Experts(5, 2, 24, dense_layers=(1,)))
    assert weights(model.config, model.precision).total == model.memory()["rollout"]


def test_a_frozen_model_keeps_the_learners_weights() -> None:
    model = tiny_model("fp8-rollout")
    model.transformer.freeze()
    assert weights(model.config, model.precision, frozen=True).total == model.memory()["rollout"]
    assert weights(model.config, model.precision).total > 1.5 * model.memory()["rollout"]


@pytest.mark.parametrize("flow", ["bf16", "fp8", "fp8-rollout-kv", "fp8[bf16_last_layers=1]", "float32"])
def test_the_cache_has_these_bytes(flow: str) -> None:
    engine = Engine(tiny_model(flow), kv_pages=64, page_size=16)
    # a calibrated cache has one scale a layer, which no token has
    assert cache_bytes_of_a_token(engine.model.config, engine.model.precision) * 64 * 16 == pytest.approx(
        engine.kv_bytes, abs=8 * engine.model.config.num_layers
    )
    other = PRESETS["bf16" if flow != "bf16" else "fp8"]
    assert cache_bytes_of_a_token(engine.model.config, other) * 64 * 16 != pytest.approx(engine.kv_bytes, rel=0.05)


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_moments_have_these_bytes(state: str) -> None:
    """In 8 bits only parameters of 4,096 elements and more, in whole blocks of 256; embedding and head never."""
    model = tiny_model("fp8", hidden_size=160, intermediate_size=200)
    optimizer = ShardedOptimizer(model.named_parameters(), OptimizerSettings(state=state))
    assert moment_bytes(model.config, OptimizerSettings(state=state)) == optimizer.nbytes
    eight, whole = (moment_bytes(model.config, OptimizerSettings(state=s)) for s in ("8bit", "fp32"))
    assert eight < whole
    muon = OptimizerSettings(name="muon")
    assert moment_bytes(model.config, muon) == ShardedOptimizer.of(model, muon).nbytes < whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64, 128])
def test_shares_are_nearly_equal_and_cover_all(ranks: int) -> None:
    config = MODELS["Qwen3-8B"]
    share = largest_share(config, ranks)
    assert num_parameters(config) <= share * ranks <= 1.02 * num_parameters(config)
    small = ModelConfig("llama", 256, 128, 256, 2, 2, 2, 64)  # of two or three blocks a matrix: they cannot be divided
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
    """Before keys, values and activations 11 GB, where all weights take 140; its factors counted by hand."""

    def held(*changes: str) -> float:
        found = memory(job("Qwen3-8B", *changes, ranks=1))
        return sum(size for label, size in found.held if "keys and values" not in label)

    shapes = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 12288), (4096, 12288), (12288, 4096))
    adapter = AdapterConfig(32)
    assert num_parameters(MODELS["Qwen3-8B"], adapter) == 36 * 32 * sum(map(sum, shapes))
    assert 10.5e9 < held("adapter.rank=32") < 11.5e9
    assert 135e9 < held() < 145e9
    linear = num_parameters(MODELS["Qwen3-8B"]) - 2 * 151936 * 4096
    low = held("adapter.rank=32", "precision=nvfp4[activation=bf16]")
    assert held("adapter.rank=32") - low == pytest.approx((1 + 4 / 128**2 - 4.5 / 8) * linear, rel=1e-3)


def test_a_frozen_base_in_four_bits_is_named_so() -> None:
    """The control is a base that is trained, whose codes take a byte each."""

    def labels(precision: str, *changes: str) -> list[str]:
        found = memory(job("Qwen3-8B", f"precision={precision}", *changes, ranks=1))
        return [label for label, _ in found.held if "with scales" in label]

    assert labels("nvfp4", "adapter.rank=32") == ["working weights in FP4, two codes to a byte, with scales"]
    assert labels("nvfp4") == ["working weights in FP4, one code to a byte, with scales"]
    assert labels("mxfp8", "adapter.rank=32") == ["working weights in FP8, with scales"]


def test_keys_change_the_parts_that_they_are_about() -> None:
    def parts(*changes: str, ranks: int = 8) -> dict[str, float]:
        found = memory(job("Qwen3-8B", *changes, ranks=ranks))
        return {label.partition(":")[0]: size for label, size in (*found.held, *found.parts)} | {"total": found.total}

    plain = parts()
    assert parts("optimizer.activation_checkpointing=true")["learning"] < 0.35 * plain["learning"]
    assert parts("optimizer.micro_batch_tokens=8192")["learning"] < 0.6 * plain["learning"]
    low = parts("optimizer.state=8bit")["AdamW moments, this rank's rows"]
    outside = 2 * 151936 * 4096  # embedding and head, whose moments stay in 32 bits
    rest = num_parameters(MODELS["Qwen3-8B"]) - outside
    assert low == pytest.approx((8 * outside + 2 * rest) / 8, rel=0.03)
    assert plain["AdamW moments, this rank's rows"] == pytest.approx(8 * (outside + rest) / 8, rel=0.01)
    reference = parts("algorithm.kl_coefficient=0.01")
    assert reference["reference model, on every rank"] == weights(MODELS["Qwen3-8B"], PRESETS["fp8"], True).total
    own = parts("precision=fp8-rollout")["working weights of the learner alone"]
    assert own == 2 * num_parameters(MODELS["Qwen3-8B"])
    assert "working weights of the learner alone" not in plain
    assert parts("engine.kv_pages=1000")["keys and values"] == 16000 * cache_bytes_of_a_token(
        MODELS["Qwen3-8B"], PRESETS["fp8"]
    )
    asleep = parts("engine.sleep=always")
    assert "keys and values" not in asleep
    assert asleep["total"] < plain["total"]
    assert "keys and values of the evaluation" in parts("evaluation.every=10")
    assert parts(ranks=16)["FP32 masters, this rank's rows"] == pytest.approx(
        plain["FP32 masters, this rank's rows"] / 2, rel=0.01
    )


def test_a_bf16_flow_takes_more_everywhere() -> None:
    given = job("Qwen3-8B", ranks=8)
    wide = memory(given.under(precision_from("bf16"), 8))
    assert wide.total > memory(given).total
    assert replace(given, ranks=1) != given
