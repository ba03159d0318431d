"""`isobit export --merge`: an adapter in its model's weights, and what the rounding takes of it."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from isobit.cli import app
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter
from isobit.model.merge import Gap, merged
from isobit.precision import E4M3, QuantSpec, quantize
from isobit.training.commands.export import export
from tests.models import tiny_model

Q, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"


MLP = {"qwen3": ("gate_proj", "down_proj"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


def _folders(tmp_path: Path, size: float, family: str = "qwen3") -> tuple[Path, Path]:
    """(a model, the folder of an adapter whose B has this size)."""
    targets = ("q_proj", "v_proj", *MLP[family])
    tiny_model(family=family, scale=4.0).save(tmp_path / "base")
    model = Model.load(tmp_path / "base", "float32", adapter=NewAdapter(4, 8, targets))
    for number, (name, parameter) in enumerate(model.named_parameters().items()):
        if name.endswith("lora_B"):
            parameter.data = size * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(number)
            )
    model.sync()
    model.save(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


def _update(folder: Path, name: str) -> Tensor:
    tensors = load_file(folder / "adapter_model.safetensors")
    key = f"base_model.model.{name.removesuffix('.weight')}"
    return 2.0 * tensors[f"{key}.lora_B.weight"].double() @ tensors[f"{key}.lora_A.weight"].double()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_merged_model_is_the_sum(tmp_path: Path, family: str) -> None:
    """Rounded once to FP32; its log-probabilities under float32 are those of the unmerged model up
    to rounding. The control is the model alone."""
    base, folder = _folders(tmp_path, 0.2, family)
    done = CliRunner().invoke(
        app, ["export", str(folder), "--merge", "--format", "fp32", "--to", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "out"))
    assert torch.equal(after[Q], (before[Q].double() + _update(folder, Q)).float())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    wanted = ("q_proj", "v_proj", *MLP[family])
    assert changed == {name for name in before if name.split(".")[-2] in wanted}
    assert any(".experts." in name for name in changed) == (family == "qwen3_moe")
    ids = [[3, 5, 7, 9, 4, 6, 8, 3]]
    found, unmerged, alone = (
        Model.load(path, "float32").logprobs(ids)[0] for path in (tmp_path / "out", folder, base)
    )
    assert float((found - unmerged).abs().max()) < 1e-4 < float((alone - unmerged).abs().max())


def test_peft_merges_to_the_same(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (pip install 'isobit[dev]')")
    transformers = pytest.importorskip("transformers")
    base, folder = _folders(tmp_path, 0.2)
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), folder
    )
    state = theirs.merge_and_unload().state_dict()
    export(folder, tmp_path / "out", "fp32", None, merge=True)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        torch.allclose(state[name], tensor, rtol=1e-5, atol=1e-6) for name, tensor in ours.items()
    )
    assert not torch.allclose(
        ours[Q], load_file(base / "model.safetensors")[Q], rtol=1e-3
    )  # the control


def test_the_gap_is_that_of_the_formula(tmp_path: Path) -> None:
    """Of one matrix by hand; a large update loses little, one below the rounding nearly all, and
    more."""
    gaps = {}
    for size in (1.0, 0.01, 1e-4):
        base, folder = _folders(tmp_path / str(size), size)
        model, gaps[size] = merged(folder, "fp8")
        assert model.transformer.adapter is None
        if size == 0.01:
            spec, sums = QuantSpec(E4M3, "128x128"), torch.zeros(3, dtype=torch.float64)
            whole = Model.load(base, "float32").named_parameters()
            for layer in range(2):
                for weight, parts in (
                    ("qkv", ("self_attn.q_proj", None, "self_attn.v_proj")),
                    ("gate_up", ("mlp.gate_proj", None)),
                    ("down", ("mlp.down_proj",)),
                ):
                    w = whole[f"layers.{layer}.{weight}"].detach()
                    heights = {"qkv": (32, 16, 16), "gate_up": (48, 48), "down": (32,)}[weight]
                    updates = [
                        torch.zeros(height, w.shape[1]).double()
                        if part is None
                        else _update(folder, f"model.layers.{layer}.{part}.weight")
                        for part, height in zip(parts, heights)
                    ]
                    update = torch.cat(updates)
                    old, new = (
                        quantize(m, spec).dequantize().double()
                        for m in (w, (w.double() + update).float())
                    )
                    sums += torch.stack(
                        [x.square().sum() for x in (w.double(), update, new - old - update)]
                    )
            assert gaps[size].update == pytest.approx(float((sums[1] / sums[0]).sqrt()), rel=1e-9)
            assert gaps[size].error == pytest.approx(float((sums[2] / sums[1]).sqrt()), rel=1e-9)
    assert gaps[1.0].error < 0.1 < gaps[0.01].error < gaps[1e-4].error
    assert gaps[1e-4].error > 1
    exact = merged(tmp_path / "0.01" / "adapter", "float32")[1]
    assert exact.error < 1e-6


def test_what_is_said_and_refused(tmp_path: Path) -> None:
    base, folder = _folders(tmp_path, 0.1)
    text = export(folder, tmp_path / "out", "bf16", "fp8-unified", merge=True)
    assert re.match(
        r"merged: the update has \d\.\d\de-\d\d of the weights' norm; in the weights as "
        r"fp8-unified multiplies them "
        r"it has an error of [\d.]+ times its own norm\n",
        text,
    )
    assert "changes nothing" in Gap(0.0, 0.0).text("fp8")
    with pytest.raises(
        IsobitError, match=r"holds an adapter, and .* is its PEFT folder.*--merge writes the model"
    ):
        export(folder, tmp_path / "again", "bf16", None)
    with pytest.raises(
        IsobitError, match="is a whole model, with no adapter to merge; leave --merge out"
    ):
        export(base, tmp_path / "again", "bf16", None, merge=True)
    with pytest.raises(IsobitError, match=r"model .*nowhere: no such directory"):
        export(tmp_path / "nowhere", tmp_path / "again", "bf16", None, merge=True)
    assert not (tmp_path / "again").exists()
