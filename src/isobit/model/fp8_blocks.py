"""FP8 block checkpoints (DeepSeek-V3, arXiv 2412.19437, section 3.3), as vLLM, SGLang and
transformers read them.

A linear layer is stored as E4M3 codes `<module>.weight` [N, K] and FP32 scales
`<module>.weight_scale_inv` [N / 128, K / 128]; a value is code times scale. `config.json` says so
under `quantization_config`. What is written are the codes and scales that the rollout multiplies,
so that a reader serves the weights that were trained with (tests/model/test_fp8_blocks.py); norms
whose weight is added to 1 are in FP32, as isobit multiplies them; a reader that keeps norms in BF16
rounds them. Left out: static activation scales, and scales of a KV cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.model.families import FAMILIES
from isobit.model.hub import names
from isobit.model.model import Model
from isobit.precision import E4M3, QTensor
from isobit.precision.quantize import BLOCK


@dataclass(frozen=True, eq=False)
class BlockCheckpoint:
    """Tensors by their Hugging Face names; `kept`: linear layers that stay in BF16, with the
    reason; `beside`: modules outside the language model, which stay as they are."""

    tensors: Mapping[str, Tensor]
    kept: Mapping[str, str]
    beside: Sequence[str] = ()

    @property
    def quantization_config(self) -> dict[str, Any]:
        """The entry of config.json: vLLM's `ignored_layers` is read from `modules_to_not_convert`
        too."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", *self.kept, *self.beside],
        }


def block_checkpoint(model: Model) -> BlockCheckpoint:
    """Return the rollout's weights. A layer whose parts are not multiples of 128 in both dimensions
    stays in BF16: readers merge query, key and value, and gate and up, along whole blocks, and
    transformers takes a block for a fraction of the matrix.

    Raises IsobitError if the model's flow has no E4M3 weights in 128x128 blocks, or no layer has
    such a shape.
    """
    whole, shapes = model.whole, dict[str, tuple[int, ...]]()
    if whole is not None and not FAMILIES[model.config.family].opened_alone:
        shapes = dict(whole.shapes)  # readers of a Qwen3.5 take experts apart too
    if names.packing_of(model.config, shapes) is not None:
        raise IsobitError(
            f"FP8 blocks are of single matrices; a {model.config.family} stores experts "
            "together; give --format bf16"
        )
    working = {weight.name: weight.working for weight in model.transformer.rollout_weights()}
    spec = model.precision.rollout.weight
    if spec is None or spec.format is not E4M3 or spec.granularity != f"{BLOCK}x{BLOCK}":
        form = "not quantized" if spec is None else str(spec)
        raise IsobitError(
            f"FP8 blocks need weights in e4m3 {BLOCK}x{BLOCK}, and those of {model.precision.name} "
            f"are {form}; give --precision fp8 or fp8-unified"
        )
    tensors: dict[str, Tensor] = {}
    recipe: dict[str, str] = {}
    for master, rows in names.parts(model.config):
        weight = working.get(master)
        ragged = [shape for _, shape in rows if any(size % BLOCK for size in shape)]
        if isinstance(weight, QTensor) and not ragged:
            tensors |= _blocks(weight, [(name, shape[0]) for name, shape in rows])
            continue
        pieces = model.named_parameters()[master].detach().split([shape[0] for _, shape in rows])
        # 1 and a norm's weight are added in float32 (Gemma), so the sum has bits that BF16 has not,
        # and a bias that balances experts decides between scores that are close
        added = master.endswith("norm") and model.config.offset_of(master)
        dtype = torch.float32 if added or master.endswith("balance") else torch.bfloat16
        tensors |= {
            name: piece.reshape(shape).to(dtype) for (name, shape), piece in zip(rows, pieces)
        }
        if weight is not None or master == "project_layers":
            shape = f"{tuple(ragged[0])} is not a multiple of {BLOCK}" if ragged else ""
            reason = shape if isinstance(weight, QTensor) else "not quantized in the flow"
            recipe |= {name.removesuffix(".weight"): reason for name, _ in rows}
    if not any(tensor.dtype == E4M3.dtype for tensor in tensors.values()):
        raise IsobitError(
            f"no layer can be stored in FP8 blocks: {next(iter(recipe.values()))}; give --format bf16"
        )
    if whole is None:
        return BlockCheckpoint(tensors, recipe)
    inside = (
        "model.language_model."  # readers skip modules by the names that they have in the class
    )
    recipe = {inside + name.removeprefix("model."): reason for name, reason in recipe.items()}
    return BlockCheckpoint(tensors, recipe, whole.modules())


def _blocks(weight: QTensor, parts: list[tuple[str, int]]) -> dict[str, Tensor]:
    heights = [height for _, height in parts]
    codes = weight.data.split(heights)
    scales = weight.scale.split([height // BLOCK for height in heights])
    tensors: dict[str, Tensor] = {}
    for (name, _), code, scale in zip(parts, codes, scales):
        tensors |= {name: code, f"{name}_scale_inv": scale}
    return tensors
