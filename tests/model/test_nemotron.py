"""Nemotron-H as NVIDIA publishes it: names and keys of its files, the sizes that are published, its
FP8 blocks, and what is stored of each kind of layer."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from isobit.errors import IsobitError
from isobit.kernels import NoStore, StateStore
from isobit.kernels.stores import KVStore
from isobit.model import Model, ModelConfig
from isobit.model.adapters.targets import projections
from isobit.model.hub.checkpoint import read_json
from isobit.model.hub.shapes import parameter_shapes
from isobit.precision import QTensor
from tests.models import NANO_3, NEMOTRON_8B, SUPER_3, one_part_values, tiny_model

from .helpers import directory, logits, oracle_logits, random_model, tokens
from .test_fp8_blocks import export
from .test_qwen3_5 import assert_goes_on_from_states


def test_files_as_they_are_published_are_read(tmp_path: Path) -> None:
    """A pattern in place of a list, a limit that is infinite, and `backbone.` before every name.
    The control: the layers in another order are other layers."""
    theirs, path = directory(tmp_path, "nemotron-h-experts")
    names = load_file(path / "model.safetensors")
    assert "backbone.layers.1.mixer.experts.5.up_proj.weight" in names
    values = json.loads((path / "config.json").read_text())
    del values["layers_block_type"]
    values |= {"hybrid_override_pattern": "ME*E", "time_step_limit": [0.0, float("inf")]}
    (path / "config.json").write_text(json.dumps(values))
    assert "Infinity" in (path / "config.json").read_text()
    sequence = tokens(40)
    found = logits(Model.load(path, "float32"), sequence)
    assert float((found - oracle_logits(theirs, sequence)).abs().max()) <= 2e-4
    (path / "config.json").write_text(json.dumps(values | {"hybrid_override_pattern": "EM*E"}))
    with pytest.raises(IsobitError, match="is missing"):
        Model.load(path, "float32")


@pytest.mark.parametrize(
    ("values", "billions", "active", "attentions"),
    [(NEMOTRON_8B, 8.10, 8.10, 4), (NANO_3, 31.6, 3.6, 6), (SUPER_3, 120.6, 12.7, 8)],
)
def test_published_sizes_have_the_parameters_that_are_published(
    values: dict, billions: float, active: float, attentions: int
) -> None:
    """Of Nemotron-H 8B; of Nemotron 3 Nano 30B-A3B, which NVIDIA gives as 31.6B of which 3.6B
    serve a token, embeddings included; and of Nemotron 3 Super, 120.6B and 12.7B. Its sizes, as
    vLLM's and others' code has them, are not of a checkpoint that was read here."""
    config = ModelConfig.from_hf(values)
    shapes = parameter_shapes(config)
    total = sum(map(math.prod, shapes.values()))
    assert total / 1e9 == pytest.approx(billions, rel=5e-3)
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    assert config.experts is not None
    share = config.experts.per_token / config.experts.count if experts else 0
    assert (total - experts * (1 - share)) / 1e9 == pytest.approx(active, rel=1e-2)
    assert config.kinds.count("full_attention") == attentions
    assert config.attention_scale == 128**-0.5


def test_what_predicts_further_tokens_is_not_read(tmp_path: Path) -> None:
    """Its tensors and keys, as Nemotron 3 Super's files have them. The control: such a tensor of
    another name."""
    theirs, path = directory(tmp_path, "nemotron-h-latent")
    values = json.loads((path / "config.json").read_text())
    more = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    (path / "config.json").write_text(json.dumps(values | more))
    tensors, sequence = load_file(path / "model.safetensors"), tokens(40)
    assert tensors["backbone.layers.0.mixer.fc1_latent_proj.weight"].shape[0] == 20
    more = {"mtp.layers.0.eh_proj.weight": torch.ones(3, 2)}
    save_file(tensors | more, path / "model.safetensors")
    model = Model.load(path, "float32")
    assert float((logits(model, sequence) - oracle_logits(theirs, sequence)).abs().max()) <= 2e-4
    save_file(tensors | {"heads.eh_proj.weight": torch.ones(3, 2)}, path / "model.safetensors")
    with pytest.raises(IsobitError, match=r"tensor heads.eh_proj.weight is not part"):
        Model.load(path, "float32")


def test_a_latent_is_in_the_flow_as_other_matrices_are() -> None:
    """In FP8, or in BF16 where that is asked for."""
    low = {
        flow: {
            weight.name.rpartition(".")[2]
            for weight in tiny_model(flow, "nemotron_h-latent").transformer.rollout_weights()
            if isinstance(weight.working, QTensor)
        }
        for flow in ("fp8", "fp8[bf16_layers=[experts_in, experts_out]]")
    }
    whole, less = low.values()
    assert whole - less == {"experts_in", "experts_out"}


def test_layers_store_what_they_are() -> None:
    """States, keys and values, or nothing; a state of another page is noticed."""
    model = tiny_model("fp8", "nemotron_h", scale=4.0)
    stores = assert_goes_on_from_states(model)
    assert [type(store) for store in stores] == [NoStore, StateStore, KVStore, NoStore]
    linear = model.config.linear
    assert linear is not None
    assert stores[1].nbytes == 16 * (4 * 4 * 8 * 12 + 2 * 3 * linear.channels)


def test_fp8_blocks_are_read_by_transformers(tmp_path: Path) -> None:
    """Of a form without experts, whose matrices are whole blocks. The control: the weights before
    quantization are further away."""
    own = one_part_values(("linear_attention", "mlp", "full_attention", "mlp"))
    linear = replace(own["linear"], value_heads=128, value_dim=2, key_dim=32)
    assert sum(linear.heights) == 768
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_kv_heads": 2, "head_dim": 64}
    model = random_model("fp8", family="nemotron_h", **{**own, **sizes, "linear": linear})
    path = export(model, tmp_path)
    theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).float().eval()
    )
    kept = read_json(path / "config.json")["quantization_config"]["modules_to_not_convert"]
    assert kept == ["lm_head"]
    sequence = tokens(40, 5)
    wanted = oracle_logits(theirs, sequence)
    found = logits(Model.load(path, "float32"), sequence)
    assert torch.allclose(found, wanted, atol=2e-3, rtol=1e-4)
    assert not torch.allclose(
        logits(model.under("float32"), sequence), wanted, atol=2e-2, rtol=1e-3
    )


def test_attention_and_mamba_stay_in_bf16_where_the_flow_says_so() -> None:
    """The nearest to NVIDIA's own choice; MLPs and experts are in FP8."""
    model = tiny_model("fp8[bf16_layers=[qkv, o]]", "nemotron_h")
    low = {
        weight.name.rpartition(".")[2]
        for weight in model.transformer.rollout_weights()
        if isinstance(weight.working, QTensor)
    }
    assert low == {"gate_up", "down"}
    everything = {
        weight.name.rpartition(".")[2]
        for weight in tiny_model("fp8", "nemotron_h").transformer.rollout_weights()
        if isinstance(weight.working, QTensor)
    }
    assert everything == {"gate_up", "down", "qkv", "o"}, "the control"


def test_adapters_leave_out_what_peft_does_not_take() -> None:
    """Mamba-2's last projection, and experts without a gate, but not the MLP beside them."""
    names = {one.name for one in projections(tiny_model("fp8", "nemotron_h").config)}
    assert "layers.0.shared.up_proj" in names
    assert "layers.1.in_proj" in names
    assert "layers.2.o_proj" in names
    assert not any("out_proj" in name or ".experts." in name for name in names)
