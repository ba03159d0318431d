"""FP8 activations and output gradients of the learner: what is logged is what was quantized, and no
bit changes."""

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch

from isobit.config import load_config
from isobit.kernels import Layout, get_ops
from isobit.model import Model
from isobit.monitor.report import write_report
from isobit.precision import QuantSpec, QuantTotals, along_rows, error_sums, quantize
from isobit.run.directory import read_jsonl
from isobit.training.measuring.quantization import LearnerTotals
from isobit.training.train import resume, train
from tests.models import level, require, tiny_model
from tests.rl.helpers import alternating, make_learner, roll_out, same_bits, snapshot
from tests.runs import fingerprint, write_config

FIGURES = ("flushed_fraction", "saturated_fraction", "relative_error")
WEIGHTS = {"qkv", "o", "gate_up", "down"}


def weights_of(run: Path) -> str:
    return hashlib.sha256(b"".join(str(fingerprint(run)[n]).encode() for n in _LEARNED)).hexdigest()


_LEARNED = ("model.safetensors", "trainer/optimizer.safetensors", "completions")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "fp8-e2e", "mxfp8"])
def test_logging_changes_no_bit_of_a_run(tmp_path: Path, base_model: Path, precision: str) -> None:
    given = [f"precision={precision}", "algorithm.updates_per_batch=2"]
    runs = [
        train(
            load_config(
                write_config(tmp_path, base_model),
                [*given, f"run.quantization_every={every}", f"run.dir={tmp_path / str(every)}"],
            )
        )
        for every in (1, 3, 0)
    ]
    assert len({weights_of(run.run_dir) for run in runs}) == 1
    logged = [
        [row["step"] for row in run.metrics if "quant/gradient_relative_error" in row]
        for run in runs
    ]
    assert logged == [[1, 2, 3, 4], [1, 3], []]
    for row in runs[0].metrics:
        for kind in ("activation", "gradient"):
            assert 0.005 < row[f"quant/{kind}_relative_error"] < 0.06
            assert 0 <= row[f"quant/{kind}_flushed_fraction"] < 0.1
            assert row[f"quant/{kind}_saturated_fraction"] == 0
    records = list(read_jsonl(runs[0].run_dir / "quantization.jsonl"))
    inputs, gradients = ({f"{name} {kind}" for name in WEIGHTS} for kind in ("input", "gradient"))
    assert set(records[0]["tensors"]) >= WEIGHTS | inputs | gradients
    assert all(v > 0 for name in gradients for v in records[0]["tensors"][name]["relative_error"])
    assert records[0]["tensors"].keys() == records[3]["tensors"].keys()


def test_a_bf16_learner_has_nothing_to_log(tmp_path: Path, base_model: Path) -> None:
    result = train(
        load_config(write_config(tmp_path, base_model), ["precision=fp8-rollout", "steps=1"])
    )
    assert not any(
        name.startswith(("quant/gradient", "quant/activation")) for name in result.metrics[0]
    )
    (record,) = read_jsonl(result.run_dir / "quantization.jsonl")
    assert set(record["tensors"]) == WEIGHTS


def test_the_report_shows_gradients_and_a_resumed_run_logs_the_same(
    tmp_path: Path, base_model: Path
) -> None:
    whole = train(load_config(write_config(tmp_path, base_model), ["run.quantization_every=2"]))
    config = load_config(
        write_config(tmp_path, base_model),
        ["run.quantization_every=2", f"run.dir={tmp_path / 'cut'}"],
    )
    train(dataclasses.replace(config, steps=2))
    resume(tmp_path / "cut", ["steps=4"])
    assert fingerprint(tmp_path / "cut") == fingerprint(whole.run_dir)
    page = write_report([whole.run_dir], tmp_path / "report.html").read_text()
    heads = [
        f"<th scope='col'>{name} {kind}</th>" for name in WEIGHTS for kind in ("input", "gradient")
    ]
    assert all(head in page for head in heads)
    assert page.index(">down<") < page.index(">qkv input<") < page.index(">qkv gradient<")
    assert "Activations and gradients flushed to zero" in page


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_what_is_watched_is_what_is_quantized(backend: str, family: str) -> None:
    """Each figure is that of the output gradient itself and of the codes of the one quantizer, for
    DGrad and WGrad."""
    require(backend)
    small = tiny_model("fp8", family)
    model = Model.init(small.config, small.tokenizer, "fp8", 0, backend, level(backend))
    gradients: list[torch.Tensor] = []
    totals = LearnerTotals(model)
    with totals.watching(True):
        hidden = model.transformer.hidden(torch.arange(3, 17), Layout.packed([14]), use="learner")
        see = totals.see

        def spy(name: str, x: torch.Tensor, quantized: object, products: str = "") -> None:
            if name == "output gradient of layers.1.o" and not products:
                gradients.append(x.clone())
            see(name, x, quantized, products)  # type: ignore[arg-type]

        totals.see = spy  # type: ignore[method-assign]
        hidden.square().sum().backward()
    (gradient,) = gradients
    spec = model.precision.gradient
    assert spec is not None
    wanted = [QuantTotals(), QuantTotals()]
    wanted[0].add(error_sums(gradient, quantize(gradient, spec)))
    wanted[1].add(error_sums(gradient, quantize(gradient, along_rows(QuantSpec()))))
    for name, expected in zip(("o gradient", "o gradient (WGrad)"), wanted):
        found = totals.by_tensor()[name]
        stats = expected.stats()
        assert found["relative_error"][1] == float(f"{stats.relative_error:.6g}")
        assert found["flushed"][1] == float(f"{stats.flushed:.6g}")
    assert get_ops(backend).backend == model.ops.backend
    assert not model.transformer._watches


def test_underflow_and_saturation_show() -> None:
    """A tensor with elements far below its block's largest is flushed; codes of too small a scale
    saturate."""
    totals = LearnerTotals(tiny_model("fp8"))
    x = torch.full((4, 128), 1e-9)
    x[:, 0] = 1.0
    totals.see("output gradient of layers.0.o", x, quantize(x, QuantSpec()))
    assert totals.metrics()["quant/gradient_flushed_fraction"] == 127 / 128
    wide = quantize(x, QuantSpec())
    totals.see("layers.0.o", x * 1000, wide)
    assert totals.metrics()["quant/activation_saturated_fraction"] == 1 / 128


def test_weights_that_are_made_anew_between_optimizer_steps_are_no_activations() -> None:
    model = tiny_model("fp8")
    samples = roll_out(model)
    learner, totals = make_learner(model), LearnerTotals(model)
    before = snapshot(learner)
    with totals.watching(True):
        model.sync()
        assert totals.metrics() == {}
        learner.learn(samples, alternating(samples), 0)
    assert not same_bits(before, snapshot(learner))
    assert {
        f"quant/{kind}_{name}" for kind in ("activation", "gradient") for name in FIGURES
    } == set(totals.metrics())
