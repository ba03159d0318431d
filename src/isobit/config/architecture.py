"""The section `model.init` of a supervised run: the sizes of a model with random weights."""

from dataclasses import dataclass
from typing import Annotated

from isobit.errors import IsobitError
from isobit.options.declare import OneOf, above, at_least
from isobit.options.families import FAMILIES


@dataclass(frozen=True)
class ArchitectureConfig:
    """A model made from scratch, with a character tokenizer over the task's alphabet."""

    family: Annotated[
        str, OneOf(FAMILIES), "whose architecture it has: norms, biases, windows, names of weights"
    ] = "qwen3"
    hidden_size: Annotated[int, at_least(8), "width of the residual stream"] = 128
    intermediate_size: Annotated[int, at_least(8), "width of the MLP, or of each expert"] = 512
    num_experts: Annotated[
        int | None, at_least(1), "experts of each layer; default: the layers are dense"
    ] = None
    experts_per_token: Annotated[
        int | None, at_least(1), "experts that a token is sent to; default: 2"
    ] = None
    num_layers: Annotated[int, at_least(1), "transformer layers"] = 4
    num_heads: Annotated[int, at_least(1), "query heads of a layer"] = 4
    num_kv_heads: Annotated[int | None, at_least(1), "key and value heads; default: num_heads"] = (
        None
    )
    head_dim: Annotated[
        int | None, at_least(2), "width of a head; default: hidden_size / num_heads"
    ] = None
    tie_embeddings: Annotated[bool, "the output projection is the embedding"] = True
    max_positions: Annotated[int, at_least(1), "most tokens of a prompt with its completion"] = 512
    rope_theta: Annotated[float, above(0), "base of the rotary positions' frequencies"] = 10000.0
    vocabulary: Annotated[
        str | None, "the tokenizer's characters; default: the task's alphabet"
    ] = None

    def __post_init__(self) -> None:
        from isobit.model.families import FAMILIES as tables  # here, so that --help needs no torch

        if tables[self.family].latent is not None:
            raise IsobitError(
                f"family: {self.family} has latent attention, whose sizes model.init does not have"
            )
        if tables[self.family].one_part:
            raise IsobitError(
                f"family: {self.family} has Mamba-2 layers, whose sizes model.init does not have"
            )
        mixtures = tables[self.family].mixtures
        mixture = mixtures is not None
        if mixtures is not None and mixtures.switch is not None:  # it may have experts
            mixture = self.num_experts is not None
        if mixture != (self.num_experts is not None):
            raise IsobitError(
                f"{self.family} needs num_experts"
                if mixture
                else f"num_experts: {self.family} is dense; use qwen3_moe"
            )
        if self.num_experts is not None and (self.experts_per_token or 2) > self.num_experts:
            raise IsobitError(
                f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}"
            )
        if not mixture and self.experts_per_token is not None:
            raise IsobitError(f"experts_per_token: {self.family} is dense without num_experts")
