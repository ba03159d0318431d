"""FP8 block checkpoints: the rollout's own bytes, read back by `transformers` and by isobit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from isobit import Model
from isobit.errors import IsobitError
from isobit.model import Experts
from isobit.model.families.rope import Rope
from isobit.model.fp8_blocks import block_checkpoint
from isobit.model.hub import names
from isobit.model.hub.checkpoint import read_json, read_weights, write_json
from isobit.model.hub.latent import Latent
from isobit.precision import QTensor
from tests.models import SCORED, latent_values, level, scored_of

from .helpers import logits, oracle_logits, random_model, tokens

WHOLE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "qwen3_5_text"]
FAMILIES += ["gemma4_text", "gemma4_text-small", "phi3", "granite", "ministral3"]
FAMILIES += ["qwen3_5_moe_text", "deepseek_v3", "qwen3_next", "glm4_moe", "minimax_m2"]


def whole_model(family: str, precision: Any = "fp8", **changes: Any) -> Model:
    """A random model all of whose matrices are whole blocks."""
    experts = {
        "qwen3_moe": Experts(4, 2, 128),
        "mixtral": Experts(4, 2, 384),
        "qwen3_5_moe_text": Experts(4, 2, 128, shared=128),
        "qwen3_next": Experts(4, 2, 128, shared=128),
        "glm4_moe": replace(SCORED, intermediate_size=128, shared=128),
        "minimax_m2": scored_of(384),
    }.get(family)
    sizes: dict[str, Any] = {**WHOLE, "experts": experts}
    if family in ("deepseek_v3", "glm4_moe_lite"):
        sizes |= latent_values(Latent(128, 96, 32, 128, 128), 4, Rope(500.0))
        sizes["experts"] = replace(sizes["experts"], intermediate_size=128, shared=128)
    return random_model(precision, family=family, **{**sizes, **changes})


def export(model: Model, folder: Path) -> Path:
    checkpoint = block_checkpoint(model)
    keys = {"dtype": "bfloat16", "quantization_config": checkpoint.quantization_config}
    model.write(folder, checkpoint.tensors, keys)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_was_written(family: str, tmp_path: Path) -> None:
    """Through the FP8 path of `transformers` itself, which on a CPU multiplies the dequantized
    weights."""
    model = whole_model(family)
    path = export(model, tmp_path)
    # as stored: config.json's bfloat16 would round the norms that are FP32
    theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).float().eval()
    )
    stored, name = load_file(path / "model.safetensors"), "model.layers.1.self_attn.o_proj.weight"
    scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(theirs.state_dict()[name], stored[name].float() * scale)
    sequence = tokens(40, 5)
    wanted = oracle_logits(theirs, sequence)
    assert torch.allclose(
        logits(Model.load(path, "float32"), sequence), wanted, atol=2e-3, rtol=1e-4
    )
    # the control: the weights before quantization are further away than any tolerance for rounding
    assert not torch.allclose(
        logits(model.under("float32"), sequence), wanted, atol=2e-2, rtol=1e-3
    )


@pytest.mark.parametrize("precision", ["fp8", "fp8-unified", "fp8[bf16_first_layers=1]"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_is_the_rollouts(family: str, precision: str, tmp_path: Path) -> None:
    model = whole_model(family, precision)
    path = export(model, tmp_path)
    stored = load_file(path / "model.safetensors")
    config = read_json(path / "config.json")["quantization_config"]
    skipped = set(config["modules_to_not_convert"])
    expected: dict[str, tuple[bytes, bytes]] = {}
    for weight in model.transformer.rollout_weights():
        if isinstance(weight.working, QTensor) and weight.name.endswith(".o"):
            name = dict(names.parts(model.config))[weight.name][0][0]
            expected[name] = tuple(
                t.contiguous().view(torch.uint8)
                for t in (weight.working.data, weight.working.scale)
            )
    assert expected
    for name, (codes, scale) in expected.items():
        assert torch.equal(stored[name].view(torch.uint8), codes)
        assert torch.equal(stored[f"{name}_scale_inv"].view(torch.uint8), scale)
    quantized = {
        name.removesuffix(".weight_scale_inv") for name in stored if name.endswith("_scale_inv")
    }
    assert not quantized & skipped
    first = dict(names.parts(model.config))["layers.0.o"][0][0].removesuffix(".weight")
    assert (first in skipped) == ("bf16_first" in precision)
    linear = {
        n.removesuffix(".weight")
        for n in stored
        if n.endswith(("_proj.weight", "_qkv.weight", "_z.weight", ".w1.weight", "gate.weight"))
    }
    assert linear <= quantized | skipped  # a reader that expects scales everywhere else finds them


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_checkpoint_computes_the_bits_of_the_model_that_was_exported(
    family: str, tmp_path: Path
) -> None:
    """Powers of two: the values are restored exactly, and quantize to the same codes again. Gemma's
    norms have more bits than BF16."""
    model, sequence = whole_model(family), tokens(60, 2)
    again = Model.load(export(model, tmp_path / "fp8"), "fp8", "reference", level("reference"))
    wanted = model.logprobs([sequence])[0]
    assert torch.equal(again.logprobs([sequence])[0].view(torch.int32), wanted.view(torch.int32))
    # the control: other numbers in the blocks, other bits
    whole_model(family).save(tmp_path / "bf16", torch.bfloat16)
    other = Model.load(tmp_path / "bf16", "fp8", "reference", level("reference")).logprobs(
        [sequence]
    )[0]
    assert not torch.equal(other.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_what_balances_experts_keeps_its_bits(family: str, tmp_path: Path) -> None:
    """The same experts are chosen then, also of scores that are close. The control: rounded to
    BF16 the bias has other bits, and chooses others."""
    model = whole_model(family)
    stored = load_file(export(model, tmp_path) / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    master = model.named_parameters()["layers.1.balance"].detach()
    assert stored[name].dtype == torch.float32
    assert torch.equal(stored[name], master)
    again = Model.load(tmp_path, "float32").named_parameters()["layers.1.balance"].detach()
    assert torch.equal(again, master)
    rounded = master.bfloat16().float()
    scores = (master + rounded).mean() - (master + rounded) / 2  # as close as it gets
    assert not torch.equal(rounded, master)
    assert not torch.equal((scores + rounded).argsort(), (scores + master).argsort())


def test_a_layer_without_whole_blocks_stays_in_bf16(tmp_path: Path) -> None:
    """Readers merge q, k and v along whole blocks: one ragged part keeps all three out."""
    model = whole_model("llama", num_kv_heads=1)
    checkpoint = block_checkpoint(model)
    assert "model.layers.0.self_attn.q_proj" in checkpoint.kept
    assert (
        checkpoint.kept["model.layers.0.self_attn.k_proj"] == "(64, 256) is not a multiple of 128"
    )
    assert "model.layers.0.self_attn.o_proj" not in checkpoint.kept
    theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(export(model, tmp_path)).float().eval()
    )
    found = logits(Model.load(tmp_path, "float32"), tokens(30))
    assert torch.allclose(found, oracle_logits(theirs, tokens(30)), atol=2e-3, rtol=1e-4)


def test_what_has_no_blocks_is_refused() -> None:
    with pytest.raises(
        IsobitError, match=r"no layer can be stored in FP8 blocks: .*not a multiple of 128"
    ):
        block_checkpoint(random_model("fp8"))
    with pytest.raises(IsobitError, match="those of bf16 are not quantized; give --precision fp8"):
        block_checkpoint(whole_model("llama", "bf16"))
    with pytest.raises(IsobitError, match="those of mxfp8 are e4m3 1x32 ue8m0"):
        block_checkpoint(whole_model("llama", "mxfp8"))
    with pytest.raises(IsobitError, match="a gemma4_text stores experts together; give --format"):
        block_checkpoint(whole_model("gemma4_text-experts"))


def test_broken_block_checkpoints_are_refused(tmp_path: Path) -> None:
    path = export(whole_model("llama"), tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    stored = load_file(path / "model.safetensors")
    broken = {key: value for key, value in stored.items() if key != f"{name}_scale_inv"}
    save_file(broken, path / "model.safetensors")
    with pytest.raises(
        IsobitError, match=rf"{name} has no scales; expected {name}_scale_inv \(2, 3\)"
    ):
        read_weights(path)
    save_file(broken | {f"{name}_scale_inv": torch.ones(3, 3)}, path / "model.safetensors")
    with pytest.raises(IsobitError, match=r"has scales of shape \(3, 3\)"):
        read_weights(path)
    config = read_json(path / "config.json")
    config["quantization_config"]["weight_block_size"] = [64, 64]
    write_json(path / "config.json", config)
    with pytest.raises(IsobitError, match="or one in FP8 blocks of 128x128"):
        Model.load(path)
