"""`isobit inspect`: figures against their definitions, the gap of every flow, and the gap taken
apart."""

import json
import math
from pathlib import Path

import pytest
import torch

from isobit.cli import app
from isobit.engine.calibration import calibrate_after
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.evaluation.inspection.mismatch import Gap, decompose, measure_gap
from isobit.evaluation.inspection.quantization import activation_health, weight_health
from isobit.model import Model
from isobit.precision import precision_from
from tests.model.helpers import random_model, tokens
from tests.models import tiny_model

SAMPLING = Sampling(n=2, max_new_tokens=10)
PROMPTS = [tokens(3, 1), tokens(5, 2)]


def test_weights_by_their_definition() -> None:
    model = random_model("fp8")
    found = {(h.layer, h.role): h for h in weight_health(model)}
    assert {role for _, role in found} == {"qkv", "o", "gate_up", "down"}
    for weight in model.transformer.rollout_weights():
        layer, role = int(weight.name.split(".")[1]), weight.name.split(".")[-1]
        x, q = weight.master.detach().double(), weight.working.dequantize().double()
        wanted = 20 * math.log10(float(x.norm() / (x - q).norm()))
        health = found[layer, role]
        assert health.snr_db == pytest.approx(wanted, abs=1e-3)
        assert health.amax == float(x.abs().max().float())
        peaks = x.abs().amax(0).float()
        assert health.outliers == pytest.approx(float(peaks.max() / peaks.median()))
        assert 28 < health.snr_db < 36


def test_activations_keys_and_values_are_seen_and_an_outlier_channel_stands_out() -> None:
    model = random_model("fp8")
    found = {(h.layer, h.role): h for h in activation_health(model, [tokens(30, 5)])}
    roles = {"qkv input", "o input", "gate_up input", "down input", "keys", "values"}
    assert set(found) == {(layer, role) for layer in range(3) for role in roles}
    products = [
        health.snr_db for (_, role), health in found.items() if role not in ("keys", "values")
    ]
    cached = [health.snr_db for (_, role), health in found.items() if role in ("keys", "values")]
    assert (
        28 < min(products) < max(products) < 40 < min(cached) < max(cached) < 60
    )  # E4M3, and 255 equal steps
    with torch.no_grad():
        model.named_parameters()["layers.1.post_norm"][7] = 5000.0
    model.sync()
    after = {(h.layer, h.role): h for h in activation_health(model, [tokens(30, 5)])}
    assert after[1, "gate_up input"].outliers > 20 * found[1, "gate_up input"].outliers
    assert after[1, "gate_up input"].flushed > found[1, "gate_up input"].flushed
    assert model.transformer.ops["learner"] is model.ops  # nothing stays behind


def test_keys_and_values_are_told_apart_by_layer_also_where_nothing_else_is_quantized() -> None:
    found = activation_health(random_model("bf16[kv_cache=e4m3]"), [tokens(30, 5), tokens(9, 6)])
    assert [(h.layer, h.role) for h in found] == [
        (layer, role) for layer in range(3) for role in ("keys", "values")
    ]


def test_an_int8_cache_loses_less_than_e4m3() -> None:
    """More than half of the error in a key or value is gone: 6 dB. Nothing saturates."""
    sequences = [tokens(30, 5), tokens(9, 6)]
    e4m3, int8 = (
        activation_health(random_model(f"bf16[kv_cache={name}]"), sequences)
        for name in ("e4m3", "int8")
    )
    for coarse, fine in zip(e4m3, int8, strict=True):
        assert (fine.layer, fine.role) == (coarse.layer, coarse.role)
        assert coarse.snr_db + 6 < fine.snr_db < 60
        assert fine.saturated == 0


def test_bf16_has_nothing_to_inspect_but_its_gap() -> None:
    model = random_model("bf16")
    assert weight_health(model) == []
    assert activation_health(model, [tokens(9)]) == []


@pytest.mark.parametrize(
    ("preset", "exact"), [("fp8", True), ("bf16", True), ("fp8-rollout", False)]
)
def test_the_gap_of_a_real_rollout(preset: str, exact: bool) -> None:
    gap = measure_gap(random_model(preset), preset, PROMPTS, SAMPLING)
    assert gap.metrics["compared_tokens"] > 10
    assert (gap.metrics["differing_tokens"] == 0) == exact
    assert gap.verdict.startswith("exact") == exact


def test_a_gap_is_measured_under_scales_of_the_data_that_the_flow_calibrates_on() -> None:
    """Of a first rollout under NeMo RL's rule, which covers late positions; the control is vLLM's,
    of prompts."""
    for flow, data in (("fp8-rollout-kv", "batch"), ("fp8-rollout-kv-verl", "prompts")):
        model, control = random_model(flow), random_model(flow)
        measure_gap(model, flow, PROMPTS, SAMPLING)
        calibrate_after(control, PROMPTS, [])
        scales, of_prompts = model.transformer.kv_scales, control.transformer.kv_scales
        assert scales is not None
        assert of_prompts is not None
        assert torch.equal(scales.values, of_prompts.values) == (data == "prompts")


def test_the_corners_of_two_engines_are_in_the_order_of_the_documents() -> None:
    """Of NeMo RL's recipes: BF16 in both is closest, FP8 in both next, and FP8 on one side alone,
    whichever, far behind. Which of the last two is farther a random model does not decide."""
    model = tiny_model("bf16", scale=8.0)
    sampling = Sampling(n=8, max_new_tokens=16)
    flows = {
        "bf16, bf16": "bf16[engines=separate]",
        "fp8, fp8": "fp8-e2e",
        "bf16, fp8": "fp8-e2e[rollout={weight: bf16, activation: bf16}]",
        "fp8, bf16": "fp8-rollout",
    }
    kl = {
        corner: measure_gap(
            model.under(precision_from(flow)), flow, ["1+1=", "23*4=", "99-98="], sampling
        ).metrics["kl_k3"]
        for corner, flow in flows.items()
    }
    assert 0 < 3 * kl["bf16, bf16"] < kl["fp8, fp8"]
    assert 2 * kl["fp8, fp8"] < min(kl["bf16, fp8"], kl["fp8, bf16"])


def test_layers_of_the_rollout_in_bf16_are_a_source() -> None:
    """Of a flow whose two sides are else alike; without it the control is left, the kernels."""
    model = random_model("fp8-e2e")
    flow = precision_from("fp8-e2e[rollout={bf16_first_layers: 1}]")
    rows = decompose(model, flow, PROMPTS, SAMPLING)
    assert [source for source, _, _ in rows] == ["all", "layers in BF16", "kernels"]
    (_, everything, _), (_, alone, without), (_, kernels, _) = rows
    assert without is not None
    assert without.metrics["kl_k3"] == kernels.metrics["kl_k3"]
    assert min(alone.metrics["kl_k3"], everything.metrics["kl_k3"]) > 1.5 * kernels.metrics["kl_k3"]


def test_verdicts_follow_the_fields_thresholds() -> None:
    def verdict(error: float, kl: float, differing: float = 9.0) -> str:
        return Gap(
            "p", {"token_mult_prob_error": error, "kl_k3": kl, "differing_tokens": differing}
        ).verdict

    assert verdict(1.0, 0.0, 0.0).startswith("exact")
    assert verdict(1.01, 5e-4).startswith("healthy")
    assert verdict(1.01, 5e-3).startswith("borderline")
    assert verdict(1.04, 5e-4).startswith("borderline")
    assert verdict(1.2, 5e-4).startswith("unhealthy")


def test_a_gap_is_taken_apart_into_what_the_flow_has() -> None:
    model = random_model("fp8-rollout")
    rows = decompose(model, precision_from("fp8-rollout-kv"), PROMPTS, SAMPLING)
    assert [source for source, _, _ in rows] == [
        "all",
        "weights",
        "activations",
        "KV cache",
        "kernels",
    ]
    kl = {source: alone.metrics["kl_k3"] for source, alone, _ in rows}
    assert all(value > 0 for value in kl.values())
    assert kl["kernels"] < min(kl["weights"], kl["activations"], kl["KV cache"])
    (_, everything, _), (_, kernels, without) = decompose(
        model, precision_from("fp8-e2e"), PROMPTS, SAMPLING
    )
    assert everything.metrics["kl_k3"] == kernels.metrics["kl_k3"]
    assert without is not None
    assert (
        without.metrics["differing_tokens"] == 0
    )  # the control: with every source off nothing is left
    both = decompose(
        model,
        precision_from("bf16[rollout={kv_cache: int8, probabilities: e4m3}]"),
        PROMPTS,
        SAMPLING,
    )
    assert [source for source, _, _ in both] == ["all", "KV cache", "probabilities"]
    assert all(alone.metrics["kl_k3"] > 0 for _, alone, _ in both)


def test_stale_weights_are_a_source() -> None:
    model, older = random_model("bf16"), random_model("bf16")
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.mul_(1.02)
    rows = decompose(model, precision_from("bf16[engines=separate]"), PROMPTS, SAMPLING, older)
    kl = {source: alone.metrics["kl_k3"] for source, alone, _ in rows}
    assert list(kl) == ["all", "kernels", "staleness"]
    assert kl["staleness"] > kl["kernels"]


def test_the_same_masters_under_another_flow_share_storage() -> None:
    model = tiny_model("fp8")
    other = model.under("bf16")
    for name, parameter in model.named_parameters().items():
        assert other.named_parameters()[name].data_ptr() == parameter.data_ptr()
    assert other.precision.name == "bf16"
    sequence = [[3, 4, 5, 6]]
    assert torch.equal(
        other.logprobs(sequence)[0], replace_precision(model, "bf16").logprobs(sequence)[0]
    )


def replace_precision(model: Model, precision: str) -> Model:
    """A control that goes through new tensors."""
    masters = {name: p.detach().clone() for name, p in model.named_parameters().items()}
    return Model(
        type(model.transformer)(model.config, precision_from(precision), model.ops, masters),
        model.tokenizer,
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_command_prints_and_writes(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run's checkpoint also what the run computed with; the control is a model without a
    run."""
    of_a_run = family == "qwen3"
    path = tmp_path / ("run/checkpoints/step-000004" if of_a_run else "model")
    tiny_model("fp8", family).save(path)
    if of_a_run:
        (tmp_path / "run/resolved.json").write_text('{"correction": "none", "page_size": 16}')
    words = [
        str(path),
        "--presets",
        "fp8,bf16[engines=separate],fp8-rollout",
        "--decompose",
        "--max-new-tokens",
        "6",
    ]
    app(["inspect", *words, "--out", str(tmp_path / "out")], standalone_mode=False)
    text = capsys.readouterr().out
    assert "fp8: exact" in text
    assert "Where the gap of fp8-rollout comes from" in text
    assert ("experts down input" in text) == (family == "qwen3_moe")
    values = json.loads((tmp_path / "out/inspection.json").read_text())
    assert [gap["preset"] for gap in values["gaps"]] == [
        "fp8",
        "bf16[engines=separate]",
        "fp8-rollout",
    ]
    assert values["gaps"][0]["differing_tokens"] == 0
    page = (tmp_path / "out/inspection.html").read_text()
    assert page.count("<svg") >= 2
    assert values["resolved"] == ({"correction": "none", "page_size": 16} if of_a_run else {})
    for shown in (text, page):
        assert ("What its run computed with" in shown) == of_a_run
        assert ("page_size" in shown) == of_a_run


def test_what_cannot_be_inspected_is_said(tmp_path: Path, base_model: Path) -> None:
    def inspect(*words: str) -> None:
        app(["inspect", str(base_model), *words], standalone_mode=False)

    with pytest.raises(IsobitError, match="unknown precision preset 'fp9'"):
        inspect("--presets", "fp9")
    with pytest.raises(IsobitError, match="give --decompose too"):
        inspect("--stale", str(base_model))
    tiny_model("fp8", num_layers=3).save(tmp_path / "other")
    with pytest.raises(IsobitError, match="expected an older checkpoint of"):
        inspect("--decompose", "--stale", str(tmp_path / "other"))
    with pytest.raises(IsobitError, match="scored under unified presets"):
        inspect("--presets", "fp8-rollout", "--reward-model", str(base_model))
    with pytest.raises(IsobitError, match=r"prompts\.jsonl"):
        inspect("--prompts", str(tmp_path / "prompts.jsonl"))
    (tmp_path / "prompts.jsonl").write_text('{"question": "1+1="}\n')
    with pytest.raises(IsobitError, match="prompt"):
        inspect("--prompts", str(tmp_path / "prompts.jsonl"))
    inspect(
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--column",
        "prompt=question",
        "--presets",
        "fp8",
    )
