"""What of a config.json is refused, in a family that is read: features whose arithmetic is not here,
and checkpoints that are quantized in another way. Left out: other families (`config.py`), and sizes
that contradict each other, which those who read them refuse."""

from collections.abc import Mapping
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families import Family


def check_supported(values: Mapping[str, Any], where: str, family: Family) -> None:
    """Raise IsobitError for a value that the family's models are not read with."""
    named = family.activation_name or family.activation
    activation = values.get(family.activation_key, named)
    if activation != named:
        raise IsobitError(
            f"{where}: unsupported {family.activation_key} {activation!r:.80}: supported is {named}"
        )
    for key, wanted in family.fixed.items():
        if values.get(key, wanted) != wanted:
            raise IsobitError(
                f"{where}: unsupported {key} {values[key]!r:.80}: supported is {wanted}"
            )
    for key in family.off:
        if values.get(key) not in (None, False):
            raise IsobitError(
                f"{where}: {key} {values[key]!r:.80} is not supported: it must be null or false"
            )
    if not values.get("is_causal", True):
        raise IsobitError(
            f"{where}: is_causal is off: a model that sees later tokens has no "
            "log-probabilities to train"
        )
    if values.get("per_layer_config") and family.global_head_dim is None:
        raise IsobitError(
            f"{where}: per_layer_config is not supported: all layers must have one form"
        )
    for check in family.checks:
        check(values, where)
    quantized = values.get("quantization_config")
    blocks: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    kind, named = blocks, "FP8 blocks of 128x128"
    if family.mixtures is not None and family.mixtures.together == "columns":
        kind, named = {"quant_method": "mxfp4"}, "MXFP4"
    if quantized and not (isinstance(quantized, dict) and kind.items() <= quantized.items()):
        raise IsobitError(
            f"{where}: the checkpoint is already quantized; give the BF16 or FP32 one, or one "
            f"in {named}"
        )
