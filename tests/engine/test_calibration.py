"""Static scales of the KV cache: where they come from, that both sides use them, and that stale
ones are noticed."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from isobit.config import load_config
from isobit.engine.calibration import Calibrator, measured_amax, prompt_amax
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.kernels import Ops, Watching
from isobit.model import Model
from isobit.model.forward.kv_scales import AmaxRecorder, KVScales, scales_from
from isobit.options import reading
from isobit.precision import Calibration, precision_from
from isobit.run.completions import COMPLETIONS, read
from isobit.run.directory import read_jsonl
from isobit.training.rollouts.rank_sampling import ClaimedGroups
from isobit.training.train import resume, train
from tests.models import require, tiny_model
from tests.runs import fingerprint, write_config

PROMPTS = ["1+1=", "23*4=", "99-98="]
CALIBRATED = "fp8[kv_cache=e4m3-calibrated]"


def test_the_rule_is_a_percentile_over_batches_a_margin_and_448() -> None:
    recorder = AmaxRecorder(1)
    for peak in (1.0, 2.0, 4.0):
        k, v, q = torch.tensor([[[-peak, 0.5]]]), torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
        ops = SimpleNamespace(attention_inputs=lambda *given: given)
        recorder(ops, None)  # type: ignore[arg-type]
        assert recorder(ops, 0).attention_inputs(q, k, v) == (q, k, v)  # type: ignore[arg-type]
    assert recorder.amax(100.0).tolist() == [[4.0, 0.0]]
    assert recorder.amax(50.0).tolist() == [[2.0, 0.0]]
    assert recorder.amax(75.0).tolist() == [[3.0, 0.0]]
    scales = scales_from(recorder.amax(100.0), Calibration(margin=1.05), 7)
    assert scales.version == 7
    assert scales.values.tolist() == [[pytest.approx(4.0 * 1.05 / 448), 1.0]]


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_unified_flow_with_calibrated_scales_agrees_bit_for_bit(backend: str) -> None:
    """No recipe of the field joins an FP8 learner with a calibrated FP8 cache; here both read the
    same codes."""
    require(backend)
    model = tiny_model(CALIBRATED)
    Calibrator(model).calibrate(PROMPTS)
    groups = Engine(model, kv_pages=32, page_size=4).generate(
        PROMPTS, Sampling(n=3, max_new_tokens=12)
    )
    completions = [c for group in groups for c in group]
    found = model.logprobs([c.prompt_token_ids + c.token_ids for c in completions])
    assert all(row[-len(c.logprobs) :].tolist() == c.logprobs for row, c in zip(found, completions))
    assert model.transformer.kv_scales is not None
    model.transformer.calibrate(
        scales_from(
            prompt_amax(model, PROMPTS) * 1.3, model.precision.calibration, model.weights_version
        )
    )
    control = model.logprobs([c.prompt_token_ids + c.token_ids for c in completions])
    assert any(
        row[-len(c.logprobs) :].tolist() != c.logprobs for row, c in zip(control, completions)
    )


def test_scales_that_are_missing_or_stale_are_noticed() -> None:
    model = tiny_model("fp8-rollout-kv")
    engine = Engine(model, kv_pages=16)
    with pytest.raises(IsobitError, match="not calibrated"):
        engine.generate(PROMPTS, Sampling(max_new_tokens=2))
    Calibrator(model).calibrate(PROMPTS)
    engine.generate(PROMPTS, Sampling(max_new_tokens=2))
    model.sync()
    with pytest.raises(
        IsobitError, match=r"those of version 0 of the weights, and the weights are at version 1"
    ):
        engine.generate(PROMPTS, Sampling(max_new_tokens=2))


def test_one_scale_per_layer_is_what_is_allocated_and_what_it_clamps_is_counted() -> None:
    per_head = Engine(tiny_model("fp8"), kv_pages=8)
    calibrated = Engine(tiny_model(CALIBRATED), kv_pages=8)
    layers = calibrated.model.config.num_layers
    codes = 8 * 16 * 2 * 2 * 8 * layers  # pages, tokens, K and V, heads, dimension
    assert calibrated.kv_bytes == codes + 2 * 4 * layers
    assert per_head.kv_bytes == codes + codes // 8 * 4
    model = calibrated.model
    Calibrator(model).calibrate(PROMPTS)
    calibrated.generate(PROMPTS, Sampling(max_new_tokens=8))
    assert calibrated.cache_metrics()["quant/kv_saturated_fraction"] < 0.02
    assert model.transformer.kv_scales is not None
    model.transformer.calibrate(
        scales_from(
            prompt_amax(model, PROMPTS) / 4, model.precision.calibration, model.weights_version
        )
    )
    calibrated.generate(PROMPTS, Sampling(max_new_tokens=8))
    assert calibrated.cache_metrics()["quant/kv_saturated_fraction"] > 0.02
    assert per_head.cache_metrics() == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "data", "moved"),
    [
        ("every_step", "prompts", [False, True, True, True]),
        ("every_step", "batch", [False, True, True, True]),
        ("once", "prompts", [False, False, False, False]),
        ("once", "batch", [False, True, False, False]),
        ("never", "prompts", [False, False, False, False]),
    ],
)
@pytest.mark.parametrize("preset", ["fp8-rollout-kv", "fp8"])
def test_a_run_calibrates_by_its_schedule_and_resumes_bit_for_bit(
    tmp_path: Path, base_model: Path, preset: str, schedule: str, data: str, moved: list[bool]
) -> None:
    precision: dict[str, object] = {"preset": preset, "kv_calibration": schedule}
    if schedule != "never":
        precision |= {"kv_calibration_data": data, "kv_percentile": 99.0}
    if preset == "fp8":
        precision["kv_cache"] = "e4m3-calibrated"
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    evaluation = {"every": 2, "samples": 4}
    optimizer = {"learning_rate": 1e-2}
    settings = {"precision": precision, "evaluation": evaluation, "optimizer": optimizer}
    whole = train(load_config(write_config(tmp_path / "whole", base_model, **settings)))
    drift = [row["quant/kv_scale_drift"] > 0 for row in whole.metrics if row["step"] > 0]
    assert drift == moved
    of_keys = {row["quant/kv_scale_k_mean"] for row in whole.metrics if row["step"] > 0}
    assert (of_keys == {1.0}) == (schedule == "never")
    if preset == "fp8":
        assert all(
            row["mismatch/differing_tokens"] == 0 for row in whole.metrics if row["step"] > 0
        )
    config = load_config(write_config(tmp_path / "cut", base_model, **settings))
    train(dataclasses.replace(config, steps=2))
    resume(tmp_path / "cut" / "run", ["steps=4"])
    assert fingerprint(tmp_path / "cut" / "run") == fingerprint(whole.run_dir)
    assert all(
        "time/calibrate" in row
        for row in read_jsonl(whole.run_dir / "metrics.jsonl")
        if row["step"] > 0
    )


class _Noting(Watching):
    """Operators that add the largest magnitudes of K, V and Q to `forward`, in NumPy."""

    def __init__(self, ops: Ops, forward: list[list[float]]) -> None:
        super().__init__(ops)
        self._forward = forward

    def attention_inputs(self, *given: Any) -> tuple[torch.Tensor, ...]:
        q, k, v = self._ops.attention_inputs(*given)
        self._forward.append([float(np.abs(x.float().numpy()).max()) for x in (k, v, q)])
        return q, k, v


def _magnitudes(monkeypatch: pytest.MonkeyPatch, measure: Callable[[], object]) -> np.ndarray:
    """Of K, V and Q [forwards, layers, 3], in the forwards of a calibration."""
    forwards: list[list[list[float]]] = []

    class Both(AmaxRecorder):
        def __call__(self, ops: Ops, layer: int | None) -> Any:
            if layer is None:
                forwards.append([])
                return super().__call__(ops, layer)
            return super().__call__(cast(Ops, _Noting(ops, forwards[-1])), layer)

    with monkeypatch.context() as patched:
        patched.setattr("isobit.engine.calibration.AmaxRecorder", Both)
        measure()
    return np.array(forwards)


_BATCH = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11], [3, 1, 4, 1, 5]]


def _nemo(forwards: np.ndarray) -> np.ndarray:
    return np.percentile(forwards, 99.9, axis=0) * 1.05 / 448


def _vllm(forwards: np.ndarray) -> np.ndarray:
    return forwards[0] / np.array([200, 100, 200])


@pytest.mark.parametrize(
    ("flow", "use", "formula", "other"),
    [
        ("fp8-rollout-kv", "learner", _nemo, _vllm),
        ("fp8-rollout-attention", "learner", _nemo, _vllm),
        ("fp8-e2e[kv_cache=e4m3-calibrated]", "learner", _nemo, _vllm),
        ("bf16[engines=separate, kv_cache=e4m3-calibrated]", "learner", _nemo, _vllm),
        ("fp8-rollout-kv-verl", "rollout", _vllm, _nemo),
        ("fp8-rollout-kv-verl[query=e4m3-calibrated]", "rollout", _vllm, _nemo),
    ],
)
def test_scales_are_those_of_the_documents(
    flow: str, use: str, formula: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo RL's over all forwards of the batch that was learned from, by the learner; vLLM's over a
    first forward of prompts, by the rollout. In NumPy, of magnitudes that were noted beside; the
    controls are the other document's formula, and the other data."""
    model = tiny_model(flow)
    batch = _magnitudes(monkeypatch, lambda: measured_amax(model, _BATCH, use, 8))
    prompts = _magnitudes(monkeypatch, lambda: prompt_amax(model, PROMPTS, use))
    assert (batch.shape, prompts.shape) == ((3, 2, 3), (1, 2, 3))
    calibrator = Calibrator(model, most_tokens=8)
    calibrator.learned_from(_BATCH)
    calibrator.calibrate(PROMPTS)
    scales = model.transformer.kv_scales
    assert scales is not None
    found, sides = scales.values.numpy(), 3 if model.precision.calibrated_queries else 2
    assert found.shape == (2, sides)

    def close(formula: Any, magnitudes: np.ndarray) -> bool:
        return np.allclose(found, formula(magnitudes)[:, :sides], rtol=3e-7, atol=0)

    own, others = (batch, prompts) if use == "learner" else (prompts, batch)
    assert close(formula, own)
    assert not close(other, own)
    assert not close(formula, others)


def _moved(model: Model, factor: float) -> None:
    """Multiply what gives keys and values, as learning might, and sync."""
    with torch.no_grad():
        for name, parameter in model.named_parameters().items():
            if "k_proj" in name or "v_proj" in name or "k_norm" in name:
                parameter.mul_(factor)
    model.sync()


@pytest.mark.parametrize("data", ["prompts", "batch"])
@pytest.mark.parametrize("queries", [False, True])
def test_once_keeps_the_first_scales_and_a_checkpoint_holds_them(data: str, queries: bool) -> None:
    """The controls: `every_step` follows the weights, `never` is 1, and a calibrator whose state
    lacks what is kept finds others."""
    options: dict[str, object] = {"preset": "fp8", "kv_cache": "e4m3-calibrated"}
    options |= {"query": "e4m3-calibrated"} if queries else {}
    batch = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]
    found: dict[str, list[list[list[float]]]] = {}
    for schedule in ("every_step", "once", "never"):
        found_on = {} if schedule == "never" else {"kv_calibration_data": data}
        model = tiny_model({**options, **found_on, "kv_calibration": schedule})
        calibrator, values = Calibrator(model), []
        for step in range(4):
            _moved(model, 1.5)
            calibrator.calibrate(PROMPTS)
            scales = model.transformer.kv_scales
            assert scales is not None
            assert scales.version == model.weights_version
            values.append(scales.values.tolist())
            if step == 2 and schedule == "once":
                state = calibrator.state()
                calibrator = Calibrator(model)
                calibrator.load_state(state)
                other = Calibrator(model)
                other.load_state({name: t for name, t in state.items() if name != "kept"})
                other.calibrate(PROMPTS)
                assert model.transformer.kv_scales.values.tolist() != values[-1]  # type: ignore[union-attr]
            calibrator.learned_from(batch)
        found[schedule] = values
    assert len({str(each) for each in found["every_step"]}) == 4
    first = 1 if data == "batch" else 0  # the batch comes after a first step on prompts
    assert found["once"][first:] == [found["every_step"][first]] * (4 - first)
    assert found["once"][0] == found["every_step"][0]
    assert found["never"] == [[[1.0] * (3 if queries else 2)] * 2] * 4


def test_the_old_words_for_the_data_are_taken_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The controls: the new words warn of nothing, and both together are a mistake."""
    reading.say_renamed.cache_clear()
    new = {
        data: precision_from(f"{CALIBRATED[:-1]}, kv_calibration_data={data}]")
        for data in ("prompts", "batch")
    }
    assert capsys.readouterr().err == ""
    for old, data in (("rollout", "prompts"), ("learner", "batch")):
        assert precision_from(f"{CALIBRATED[:-1]}, kv_calibration={old}]") == new[data]
        assert capsys.readouterr().err.startswith(
            f"warning: precision.kv_calibration: {old} is called kv_calibration_data: {data} now"
        )
    both = {"preset": CALIBRATED, "kv_calibration": "learner", "kv_calibration_data": "batch"}
    with pytest.raises(IsobitError, match="kv_calibration: is called kv_calibration_data"):
        precision_from(both)
    with pytest.raises(IsobitError, match="expected every_step, once or never, got 'learned'"):
        precision_from({"preset": CALIBRATED, "kv_calibration": "learned"})


def test_a_rule_that_an_older_release_had_is_recorded_in_its_words() -> None:
    """So that a run which began with it goes on; the control is a rule that it had not."""
    rule = Calibration(data="batch")
    assert str(rule) == ("Calibration(side='learner', percentile=99.9, margin=1.05, prompts=8)")
    assert str(dataclasses.replace(rule, schedule="once")) == f"once: {rule}"


def _spied_run(
    folder: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch, precision: dict[str, object]
) -> tuple[Path, list[KVScales], list[dict[str, torch.Tensor]]]:
    """A run; and, of every rollout in it, the scales that it had and the masters that it was of."""
    scales: list[KVScales] = []
    masters: list[dict[str, torch.Tensor]] = []
    sample = ClaimedGroups.__call__

    def spy(self: ClaimedGroups, *arguments: Any) -> object:
        model = self._engine.model
        assert model.transformer.kv_scales is not None
        assert model.transformer.kv_scales.version == model.weights_version
        scales.append(model.transformer.kv_scales)
        masters.append({name: p.detach().clone() for name, p in model.named_parameters().items()})
        return sample(self, *arguments)

    monkeypatch.setattr(ClaimedGroups, "__call__", spy)
    settings = {"precision": precision, "optimizer": {"learning_rate": 1e-2}, "steps": 3}
    result = train(load_config(write_config(folder, base_model, **settings)))
    return result.run_dir, scales, masters


@pytest.mark.parametrize("preset", ["fp8-rollout-kv", "fp8"])
@pytest.mark.parametrize("queries", [False, True])
def test_learner_side_scales_are_of_the_updated_weights_and_the_whole_batch(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch, preset: str, queries: bool
) -> None:
    """NeMo RL's order: update, then a forward over all of the training batch. Computed anew from
    the recorded batch and the masters of each rollout; the control are the masters of one update
    before."""
    options = {"kv_cache": "e4m3-calibrated"} | ({"query": "e4m3-calibrated"} if queries else {})
    precision: dict[str, object] = {"preset": preset, "kv_calibration_data": "batch"}
    precision |= options if preset == "fp8" else {"rollout": options}
    run_dir, scales, masters = _spied_run(tmp_path, base_model, monkeypatch, precision)
    assert len(scales) == 3
    rows = list(read(run_dir / COMPLETIONS))
    for step in (1, 2):
        batch = [
            [*row["prompt_ids"], *row["completion_ids"]] for row in rows if row["step"] == step
        ]
        assert len(batch) == 16
        found = [
            _scales_of(base_model, precision, weights, batch)
            for weights in (masters[step], masters[step - 1])
        ]
        assert scales[step].values.shape == (2, 3 if queries else 2)
        assert scales[step].values.tolist() == found[0].tolist()
        assert (scales[step].values[:, 1] != found[1][:, 1]).all()  # a norm bounds keys and queries


def _scales_of(
    base_model: Path,
    precision: dict[str, object],
    masters: dict[str, torch.Tensor],
    batch: list[list[int]],
) -> torch.Tensor:
    model = Model.load(base_model, precision)
    with torch.no_grad():
        for name, parameter in model.named_parameters().items():
            parameter.copy_(masters[name])
    model.sync()
    amax = measured_amax(model, batch, "learner", 1 << 20)
    return scales_from(amax, model.precision.calibration, 0).values


def test_calibrated_queries_agree_bit_for_bit_and_are_static() -> None:
    """One scale for the queries of a layer on both sides; the control is another scale on one of
    them."""
    model = tiny_model("fp8[kv_cache=e4m3-calibrated, query=e4m3-calibrated]")
    assert "e4m3 per layer, calibrated, fp32" in model.precision.table()
    engine = Engine(model, kv_pages=32, page_size=4)
    with pytest.raises(IsobitError, match="not calibrated"):
        engine.generate(PROMPTS, Sampling(max_new_tokens=2))
    calibrator = Calibrator(model)
    calibrator.calibrate(PROMPTS)
    assert calibrator.step_metrics()["quant/query_scale_mean"] > 0
    groups = engine.generate(PROMPTS, Sampling(n=3, max_new_tokens=12))
    completions = [c for group in groups for c in group]

    def agree() -> bool:
        found = model.logprobs([c.prompt_token_ids + c.token_ids for c in completions])
        return all(
            row[-len(c.logprobs) :].tolist() == c.logprobs for row, c in zip(found, completions)
        )

    assert agree()
    assert model.transformer.kv_scales is not None
    model.transformer.kv_scales.values[:, 2] *= 1.3
    assert not agree()
