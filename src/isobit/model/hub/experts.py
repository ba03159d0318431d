"""Sizes of a mixture of experts, and their keys in config.json.

Left out: the arithmetic (`forward/moe.py`), and names and shapes of tensors (`names.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families import Mixtures, flag, whole

_SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `count` MLPs of `intermediate_size`, of which `per_token` serve a
    token, with gates that sum to 1 if `normalize`; in all layers but `dense_layers`. `shared`: the
    size of an MLP that serves every token beside them, 0 if there is none."""

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()
    shared: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise IsobitError(
                f"config.json: {self.per_token} experts per token, of {self.count}: expected 1 to "
                "all"
            )

    @staticmethod
    def from_hf(
        values: Mapping[str, Any], where: str, mixtures: Mixtures, layers: int
    ) -> "Experts":
        """The number of experts is num_local_experts or num_experts: either name, in either
        family."""
        names = [key for key in ("num_local_experts", "num_experts") if key in values]
        counts = {whole(values, key, where) for key in names} or {mixtures.count}
        if len(counts) > 1:
            raise IsobitError(
                f"{where}: num_local_experts and num_experts name one number, but differ; keep one "
                "of them"
            )
        count = counts.pop()
        per_token = whole(values, "num_experts_per_tok", where, mixtures.per_token)
        if not mixtures.own_keys:
            return Experts(count, per_token, whole(values, "intermediate_size", where))
        size = whole(values, "moe_intermediate_size", where, mixtures.size)
        shared = whole(values, _SHARED, where, mixtures.shared) if mixtures.shared else 0
        if not mixtures.dense:
            return Experts(count, per_token, size, shared=shared)
        normalize = flag(values, "norm_topk_prob", where)
        dense = _dense_layers(values, where, layers)
        return Experts(count, per_token, size, normalize, dense, shared)

    def to_hf(self, mixtures: Mixtures) -> dict[str, Any]:
        """The keys of config.json."""
        values: dict[str, Any] = {
            "num_local_experts": self.count,
            "num_experts_per_tok": self.per_token,
        }
        if not mixtures.own_keys:
            return values
        values |= {"num_experts": self.count, "moe_intermediate_size": self.intermediate_size}
        if self.shared:
            values[_SHARED] = self.shared
        if not mixtures.dense:
            return values
        return values | {
            "norm_topk_prob": self.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(self.dense_layers),
        }


def _dense_layers(values: Mapping[str, Any], where: str, layers: int) -> tuple[int, ...]:
    step = whole(values, "decoder_sparse_step", where, 1)
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise IsobitError(
            f"{where}: mlp_only_layers has the wrong type: expected a list of layers, got "
            f"{dense!r:.80}"
        )
    listed = set(dense)
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
