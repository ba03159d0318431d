"""Sizes of a mixture of experts, and their keys in config.json.

Left out: the arithmetic (`forward/moe.py`), and names and shapes of tensors (`names.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError
from isobit.kernels import Scoring
from isobit.model.families import Mixtures, flag, number, whole
from isobit.model.hub.layer_kinds import EXPERTS, PATTERN, kinds_from_hf

_SHARED = "shared_expert_intermediate_size"
_KINDS = ("sparse", "dense")
_BESIDE = ("num_experts", "top_k_experts", "moe_intermediate_size")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `count` MLPs of `intermediate_size`, of which `per_token` serve a
    token, with gates that sum to 1 if `normalize`; in all layers but `dense_layers`. `shared`: the
    size of an MLP that serves every token next to them, 0 if there is none. `scoring`: how experts
    are chosen by their own scores, None where a softmax over all gives their gates. `latent`:
    the size of what experts are given and give, 0 if that is the hidden state's."""

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()
    shared: int = 0
    scoring: Scoring | None = None
    latent: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise IsobitError(
                f"config.json: {self.per_token} experts per token, of {self.count}: expected 1 to "
                "all"
            )
        if self.scoring is not None:
            self.scoring.check(self.count, self.per_token)

    @staticmethod
    def from_hf(
        values: Mapping[str, Any], where: str, mixtures: Mixtures, layers: int
    ) -> "Experts | None":
        """Read them from a config.json. Their number is num_local_experts or num_experts: either
        name, in either family. None where a key says that there are none."""
        if mixtures.switch is not None:
            return _beside_mlp(values, where, mixtures.switch)
        routed = mixtures.own_keys and mixtures.scoring
        known = ("num_local_experts", "n_routed_experts" if routed else "num_experts")
        names = [key for key in known if key in values]
        counts = {whole(values, key, where) for key in names} or {mixtures.count}
        if len(counts) > 1:
            raise IsobitError(
                f"{where}: {' and '.join(names)} name one number, but differ; keep one of them"
            )
        count = counts.pop()
        per_token = whole(values, "num_experts_per_tok", where, mixtures.per_token)
        if not mixtures.own_keys:
            scoring = None if mixtures.scoring is None else Scoring(*mixtures.scoring)
            size = whole(values, "intermediate_size", where)
            return Experts(count, per_token, size, scoring=scoring)
        size = whole(values, "moe_intermediate_size", where, mixtures.size)
        shared = _shared(values, where, mixtures, size)
        if not mixtures.dense:
            return Experts(count, per_token, size, shared=shared)
        normalize = flag(values, "norm_topk_prob", where, mixtures.normalize)
        dense = _dense_layers(values, where, mixtures, layers)
        scoring = None
        if mixtures.scoring is not None:
            groups, best, scale = mixtures.scoring
            scoring = Scoring(
                whole(values, "n_group", where, groups),
                whole(values, "topk_group", where, best),
                number(values, "routed_scaling_factor", where, scale),
            )
        latent = 0
        if mixtures.latent_key is not None and values.get(mixtures.latent_key) is not None:
            latent = whole(values, mixtures.latent_key, where)
        return Experts(count, per_token, size, normalize, dense, shared, scoring, latent)

    def to_hf(self, mixtures: Mixtures, layers: int) -> dict[str, Any]:
        """Return the keys of config.json."""
        if mixtures.switch is not None:
            sizes = self.count, self.per_token, self.intermediate_size
            return {mixtures.switch: True, **dict(zip(_BESIDE, sizes))}
        values: dict[str, Any] = {
            "num_local_experts": self.count,
            "num_experts_per_tok": self.per_token,
        }
        if not mixtures.own_keys:
            return values
        values["n_routed_experts" if self.scoring else "num_experts"] = self.count
        values["moe_intermediate_size"] = self.intermediate_size
        if self.latent:
            assert mixtures.latent_key is not None
            values[mixtures.latent_key] = self.latent
        if self.scoring is not None:
            values |= {
                "n_shared_experts": self.shared // self.intermediate_size,
                **({mixtures.shared_key: self.shared} if mixtures.shared_key else {}),
                "n_group": self.scoring.groups,
                "topk_group": self.scoring.best,
                "routed_scaling_factor": self.scoring.scale,
            }
        elif self.shared:
            values[_SHARED] = self.shared
        if not mixtures.dense:
            return values
        return values | {"norm_topk_prob": self.normalize} | self._dense_to_hf(mixtures, layers)

    def _dense_to_hf(self, mixtures: Mixtures, layers: int) -> dict[str, Any]:
        if mixtures.dense_key == PATTERN:  # which layers have what is written with the layers
            return {"n_shared_experts": 1}
        if mixtures.dense_key == "first_k_dense_replace":
            return {mixtures.dense_key: len(self.dense_layers)}
        if mixtures.dense_key == "mlp_layer_types":
            kinds = [_KINDS[layer in self.dense_layers] for layer in range(layers)]
            return {mixtures.dense_key: kinds}
        return {"decoder_sparse_step": 1, mixtures.dense_key: list(self.dense_layers)}


def _beside_mlp(values: Mapping[str, Any], where: str, switch: str) -> Experts | None:
    """Return the experts next to the MLP of every layer, if the `switch` says that there are any."""
    if not flag(values, switch, where):
        return None
    count, per_token, size = (whole(values, key, where) for key in _BESIDE)
    return Experts(count, per_token, size, shared=whole(values, "intermediate_size", where))


def _shared(values: Mapping[str, Any], where: str, mixtures: Mixtures, size: int) -> int:
    """Return the size of the MLP next to the experts, whose own is `size`."""
    if not mixtures.shared:
        return 0
    if mixtures.shared_key is not None:
        return whole(values, mixtures.shared_key, where, mixtures.shared)
    if mixtures.scoring is not None:
        return size * whole(values, "n_shared_experts", where, mixtures.shared)
    return whole(values, _SHARED, where, mixtures.shared)


def _dense_layers(
    values: Mapping[str, Any], where: str, mixtures: Mixtures, layers: int
) -> tuple[int, ...]:
    """Return the layers that have one MLP, or none."""
    key = mixtures.dense_key
    if key == PATTERN:
        layer_kinds = kinds_from_hf(values, where)
        return tuple(layer for layer in range(layers) if layer_kinds[layer] != EXPERTS)
    if key == "first_k_dense_replace":
        return tuple(range(min(whole(values, key, where, mixtures.dense, least=0), layers)))
    if key == "mlp_layer_types":
        kinds = values.get(key) or [_KINDS[layer == 0] for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or {*map(str, kinds)} - {*_KINDS}:
            raise IsobitError(
                f"{where}: {key} must name {layers} layers, each {' or '.join(_KINDS)}, got "
                f"{kinds!r:.80}"
            )
        return tuple(layer for layer in range(layers) if kinds[layer] == _KINDS[1])
    step = whole(values, "decoder_sparse_step", where, 1)
    dense = values.get(key) or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise IsobitError(
            f"{where}: {key} has the wrong type: expected a list of layers, got {dense!r:.80}"
        )
    listed = set(dense)
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
