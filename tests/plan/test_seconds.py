"""The model of time: what lengthens a step and what shortens it; how good it is, `benchmarks/published.py` says."""

from dataclasses import replace

import pytest

from benchmarks.plan_jobs import MODELS, job
from isobit.plan import Estimate, Lengths, estimate
from isobit.plan.devices import DEVICES, FACTORS, Factors, device_named, rates
from isobit.plan.estimate import fewest_ranks
from isobit.plan.memory import num_parameters
from isobit.plan.seconds import seconds
from isobit.plan.work import Rates, quantized_share
from isobit.precision import precision_from

_FULL = Factors(copy=1, products_bf16=1, products_fp8=1, experts=1, attention=1, cache_fp8=1, layer_s=0, step_s=0)


def _of(*changes: str, ranks: int = 8, device: str = "h200", name: str = "Qwen3-8B") -> Estimate:
    return estimate(job(name, *changes, ranks=ranks, device=device))


def test_a_step_is_its_parts() -> None:
    found = _of().seconds
    parts = (found.rollout, found.logprobs, found.learn, found.exposed, found.update, found.sync)
    assert found.total == pytest.approx(sum(parts))
    assert 0 < found.exposed < found.exchange
    assert _of("rollouts_ahead=1").seconds.logprobs > found.logprobs == 0


def test_factors_only_lengthen() -> None:
    given = _of()
    bound = seconds(given.job, given.memory, _FULL)
    for part in ("rollout", "learn", "update", "sync"):
        assert getattr(bound, part) < getattr(given.seconds, part), part


def test_fp8_is_faster_than_bf16_and_more_gpus_than_few() -> None:
    low = _of(ranks=64)
    wide = estimate(low.job.under(precision_from("bf16"), 64))
    assert wide.seconds.rollout > low.seconds.rollout
    assert wide.seconds.learn > low.seconds.learn
    assert wide.seconds.sync > low.seconds.sync
    assert _of(ranks=8).seconds.total > low.seconds.total
    assert _of(ranks=64, device="h20").seconds.learn > low.seconds.learn
    assert _of("sampling.max_new_tokens=1024", ranks=64).seconds.total < low.seconds.total
    again, mlp = (
        _of(f"optimizer.activation_checkpointing={level}", ranks=64).seconds.learn for level in ("true", "mlp")
    )
    assert again > 1.2 * low.seconds.learn
    assert 1.05 * low.seconds.learn < mlp < again


def test_smaller_masters_and_moments_are_updated_faster() -> None:
    """By the bytes that are read and written; the moments of all matrices but embedding and head have 8 bits."""
    full = _of().seconds.update
    wide = 2 * 151936 * 4096 / num_parameters(MODELS["Qwen3-8B"])
    low = wide * 30 + (1 - wide) * (18 + 0.125)
    for change, bytes_of_a_parameter in (("optimizer.masters=bf16", 26), ("optimizer.state=8bit", low)):
        assert _of(change).seconds.update / full == pytest.approx(bytes_of_a_parameter / 30, rel=0.01), change


def test_completions_that_end_early_take_less_but_the_longest_counts() -> None:
    given = job("Qwen3-8B", ranks=8)
    whole = estimate(given)
    early = estimate(replace(given, lengths=Lengths(512, 1024, 4096)))
    assert early.seconds.rollout < whole.seconds.rollout
    short = estimate(replace(given, lengths=Lengths(512, 1024, 1024)))
    assert short.seconds.rollout < early.seconds.rollout


def test_layers_in_bf16_are_no_fp8_work() -> None:
    config = MODELS["Qwen3-8B"]
    assert quantized_share(config, precision_from("fp8"), "learner") == pytest.approx(1)
    assert quantized_share(config, precision_from("bf16"), "learner") == 0
    assert quantized_share(config, precision_from("fp8[bf16_first_layers=9]"), "learner") == pytest.approx(0.75)
    assert 0 < quantized_share(config, precision_from("fp8[bf16_layers=down]"), "rollout") < 1
    assert quantized_share(config, precision_from("fp8-rollout"), "learner") == 0


def test_devices_have_sources_and_rates_in_proportion() -> None:
    for name, device in DEVICES.items():
        assert device_named(name.upper()) is device
        assert "data sheet" in device.source
        assert device.fp8 == pytest.approx(2 * device.bf16, rel=0.01)
        assert device.network < device.link < device.bandwidth
    assert all(0 < share <= 1 for name, share in vars(FACTORS).items() if not name.endswith("_s"))
    assert rates(DEVICES["h100"])["between"] == Rates(
        0.9 * 3.35e12, FACTORS.products_bf16 * 989.4e12, FACTORS.products_fp8 * 1978.9e12
    )


def test_the_fewest_gpus_that_fit() -> None:
    given = job("Qwen3-8B")
    fewest = fewest_ranks(given)
    assert fewest is not None
    assert estimate(given.under(given.precision, fewest)).fits
    assert not estimate(given.under(given.precision, fewest // 2)).fits
    large = job("Llama-3.1-70B", "precision=bf16", device="h100")
    assert fewest_ranks(large) is None  # 141 GB of working weights on every GPU
