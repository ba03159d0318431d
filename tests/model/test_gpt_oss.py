"""gpt-oss: MXFP4 as transformers dequantizes it, experts in one tensor, sinks that rollout and
learner share."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.fp8_blocks import block_checkpoint
from isobit.model.hub.mxfp4_blocks import dequantized
from isobit.model.hub.packed_experts import in_files, place
from tests.engine.helpers import differing
from tests.models import tiny_model

from .helpers import directory, logits, oracle_logits, tokens

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
_EXPERTS = "model.layers.1.mlp.experts."


def packed(
    shape: tuple[int, ...], seed: int, lowest: int = 117, highest: int = 124
) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of values [E, N, K]."""
    random = torch.Generator().manual_seed(seed)
    experts, rows, columns = shape
    blocks = torch.randint(
        0, 256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8
    )
    return blocks, torch.randint(
        lowest, highest, blocks.shape[:3], generator=random, dtype=torch.uint8
    )


def in_mxfp4(path: Path) -> tuple[Path, dict[str, Tensor]]:
    """The directory of a tiny model whose experts are MXFP4, and what they dequantize to by
    transformers."""
    _, path = directory(path, "gpt-oss", **SIZES)
    tensors, values = load_file(path / "model.safetensors"), {}
    for seed, name in enumerate(sorted(name for name in tensors if name.endswith("_proj"))):
        if ".experts." in name:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks, scales = packed((experts, outputs, inputs), seed)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    return path, values


def test_every_code_and_scale_is_what_transformers_makes_of_it() -> None:
    """Exactly: BF16 holds every value. Codes' low halves come first; the control has them the other
    way round."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).repeat(1, 1, 3, 1)
    scales = torch.tensor([7, 127, 247], dtype=torch.uint8).expand(1, 16, 3).contiguous()
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    found = dequantized(blocks, scales)
    assert torch.equal(found, wanted.float())
    assert torch.equal(found.bfloat16().float(), found)
    assert not torch.equal(dequantized(blocks << 4 | blocks >> 4, scales), found)
    assert bool(torch.isnan(dequantized(blocks, torch.full_like(scales, 255))).all())
    smallest = dequantized(torch.full_like(blocks, 0x11), torch.zeros_like(scales))
    assert torch.equal(smallest, torch.full_like(smallest, 2.0**-128))


def test_a_model_in_mxfp4_is_the_one_of_the_dequantized_weights(tmp_path: Path) -> None:
    path, values = in_mxfp4(tmp_path / "mxfp4")
    mine = Model.load(path, "float32", "auto")
    theirs, other = directory(tmp_path / "plain", "gpt-oss", **SIZES)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name in values:
                parameter.copy_(values[name].float())
    sequence = tokens(40)
    assert float((logits(mine, sequence) - oracle_logits(theirs, sequence)).abs().max()) < 1e-4
    assert (
        float(
            (
                logits(Model.load(other, "float32", "auto"), sequence)
                - oracle_logits(theirs, sequence)
            )
            .abs()
            .max()
        )
        > 0.1
    )
    mine.save(tmp_path / "saved", torch.bfloat16)  # which loses nothing of them
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"gate_up_proj_scales": None},
            "gate_up_proj_blocks has no scales; expected .*gate_up_proj_scales",
        ),
        ({"gate_up_proj_blocks": None}, "MXFP4 scales .*gate_up_proj_scales have no blocks"),
        (
            {"down_proj_scales": torch.zeros(5, 64, 2, dtype=torch.uint8)},
            r"scales of shape \(5, 64, 2\)",
        ),
        ({"down_proj_scales": torch.zeros(5, 64, 1)}, "dtype torch.float32; expected .*uint8"),
        (
            {"down_proj_blocks": torch.zeros(5, 64, 16, dtype=torch.uint8)},
            r"has shape \(5, 64, 16\); expected",
        ),
        (
            {"down_proj_scales": torch.full((5, 64, 1), 255, dtype=torch.uint8)},
            "down_proj holds NaN or infinity",
        ),
        (
            {"down_proj_scales": torch.full((5, 64, 1), 254, dtype=torch.uint8)},
            "down_proj holds NaN or infinity",
        ),
        ({"down_proj": torch.zeros(5, 32, 64)}, "down_proj is there twice, in MXFP4 too"),
        ({"down_proj_bias": None}, "down_proj_bias is missing"),
        (
            {"gate_up_proj_bias": torch.zeros(5, 63)},
            r"has shape \(5, 63\), but config.json asks for \(5, 64\)",
        ),
    ],
)
def test_malformed_experts_are_named(
    change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    path, _ = in_mxfp4(tmp_path)
    tensors = load_file(path / "model.safetensors") | {
        _EXPERTS + name: value for name, value in change.items()
    }
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IsobitError, match=message) as caught:
        Model.load(path, "float32", "reference")
    assert "\n" not in str(caught.value)


def test_more_experts_than_the_weights_have_numbers(tmp_path: Path) -> None:
    """It takes no longer than a right one, however many config.json says."""
    _, path = directory(tmp_path, "gpt-oss", **SIZES)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_local_experts": 2**30}))
    with pytest.raises(IsobitError, match="1,073,741,824 experts"):
        Model.load(path, "float32", "reference")


def test_experts_in_files_and_apart() -> None:
    own = {
        "model.layers.0.mlp.experts.1.up_proj.weight": (3, 8),
        "model.layers.0.mlp.experts.1.down_proj.bias": (8,),
    }
    files = {
        "model.layers.0.mlp.experts.gate_up_proj": (2, 8, 6),
        "model.layers.0.mlp.experts.down_proj_bias": (2, 8),
    }
    assert in_files(own, "columns") == files
    del own["model.layers.0.mlp.experts.1.down_proj.bias"]
    rows = {"model.layers.0.mlp.experts.gate_up_proj": (2, 6, 8)}
    assert in_files(own, "rows") == rows
    assert place("model.layers.0.mlp.router.weight") is None


def test_fp8_blocks_are_refused() -> None:
    with pytest.raises(IsobitError, match="a gpt_oss stores experts together; give --format bf16"):
        block_checkpoint(tiny_model("fp8", "gpt_oss", backend="reference"))


@pytest.mark.parametrize("preset", ["bf16", "fp8", "fp8-unified"])
def test_zero_tokens_differ_and_sinks_count(preset: str) -> None:
    """The controls: a learner whose sinks, or whose experts' biases, are others."""
    model = tiny_model(preset, "gpt_oss", scale=6.0, windows=(4, None))
    with torch.no_grad():
        for name, parameter in model.named_parameters().items():
            if parameter.ndim == 1:
                parameter.add_(
                    0.3
                    * torch.randn(
                        parameter.shape, generator=torch.Generator().manual_seed(len(name))
                    )
                )
    model.sync()
    prompts = [model.tokenizer.encode(text) for text in ("12+3=", "7*8-", "1")]
    groups = Engine(model).generate(prompts, Sampling(n=3, max_new_tokens=10, seed=2))
    count, total = differing(model, groups)
    assert (count, total > 40) == (0, True)
    for role in ("sinks", "down_bias"):
        kept = {
            name: p.detach().clone()
            for name, p in model.named_parameters().items()
            if name.endswith(role)
        }
        with torch.no_grad():
            for name in kept:
                model.named_parameters()[name].add_(0.1)
        model.sync()
        assert differing(model, groups)[0] > total // 3
        with torch.no_grad():
            for name, values in kept.items():
                model.named_parameters()[name].copy_(values)
    model.sync()
    assert differing(model, groups)[0] == 0
