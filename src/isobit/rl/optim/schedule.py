"""The optimizers' settings, each declared once, and the learning rate of each step."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from isobit.errors import IsobitError
from isobit.options.declare import Formerly, NotAnOption, above, at_least, at_most, below

Beta = Annotated[float, at_least(0), below(1)]


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, or Muon for the matrices of linear layers."""

    learning_rate: Annotated[
        float, above(0), "the largest rate of the run; about 1e-4 for an adapter"
    ] = 1e-6
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        "how the rate falls after the warmup; constant: it does not",
    ] = "constant"
    warmup_steps: Annotated[int, at_least(0), "optimizer steps in which the rate rises from 0"] = 0
    final_fraction: Annotated[
        float, at_least(0), at_most(1), "share of the rate that is left at the end of a schedule"
    ] = 0.0
    weight_decay: Annotated[float, at_least(0), "decoupled, as in AdamW"] = 0.0
    betas: Annotated[tuple[Beta, Beta], "decay of AdamW's two moments"] = (0.9, 0.999)
    eps: Annotated[float, above(0), "AdamW's, added to the root of the second moment"] = 1e-8
    max_grad_norm: Annotated[
        float, above(0), "a gradient with a larger norm is scaled down to it"
    ] = 1.0
    name: Annotated[
        Literal["adamw", "muon"],
        "muon: orthogonalized momentum for the matrices of attention, MLPs and experts, and "
        "AdamW for all else",
    ] = "adamw"
    momentum: Annotated[float, at_least(0), below(1), "decay of Muon's momentum"] = 0.95
    nesterov: Annotated[bool, "Muon's momentum looks one step ahead"] = True
    ns_steps: Annotated[
        int,
        at_least(1),
        at_most(20),
        "Muon's Newton-Schulz iterations that orthogonalize an update",
    ] = 5
    adjust_lr: Annotated[
        Literal["match_rms_adamw", "original"],
        "what Muon multiplies the rate by, for a matrix of A rows and B columns: 0.2 · √max(A, B), "
        "so that one rate serves AdamW's masters too; or √max(1, A / B)",
    ] = "match_rms_adamw"
    state: Annotated[
        Literal["fp32", "8bit"],
        "how AdamW's moments are kept. 8bit: one code for each element and one scale for 256, "
        "rounded stochastically; those of embedding and head stay in FP32",
    ] = "fp32"
    masters: Annotated[
        Literal["fp32", "bf16"],
        "how the trained weights are kept. bf16: half of the bytes; an update is computed in "
        "float32 and rounded stochastically, with random bits that a repeated run draws again. A "
        "model in FP32 is rounded to nearest when it is read",
    ] = "fp32"
    micro_batch_tokens: Annotated[
        Annotated[int, at_least(1)] | Literal["auto"],
        "tokens of one forward and backward. auto: the most that fit into the memory; the run's "
        "`config.yaml` keeps this number",
    ] = 16384
    activation_checkpointing: Annotated[
        bool | Literal["mlp"],
        "what is kept of the forward for the backward. false: everything. true: only the inputs of "
        "each layer; the rest is computed again. mlp: all but the inputs of the MLP's gates, the "
        "largest part. The bits are the same",
    ] = False
    max_bad_steps: Annotated[
        int,
        at_least(1),
        "the run ends after so many skipped steps in a row. Skipped are steps whose loss or "
        "gradient is not finite",
    ] = 3
    gradient_sum_group: Annotated[
        int,
        Formerly("sum_group"),
        at_least(1),
        "the gradients of this many micro-batches are added first, and then these sums. With 8 "
        "on machines of 8 GPUs, an eighth as much is sent between machines. Changes how "
        "gradients are rounded",
    ] = 1
    separate_zero_advantage: Annotated[
        bool,
        Formerly("idle_apart"),
        "puts samples whose advantage is 0 into separate micro-batches, which cost nothing. "
        "Changes how gradients are rounded",
    ] = False
    share_prompts: Annotated[
        bool,
        "computes a prompt once for all of its completions in a micro-batch. Log-probabilities "
        "keep their bits, and gradients are rounded differently. Off with linear attention, "
        "and where a mixture of experts replays routes or balances its load",
    ] = True
    total_steps: NotAnOption[int] = 1
    """Calls of `learning_rate`."""
    seed: NotAnOption[int] = 0
    """The run's, for the rounding of BF16 masters and of 8-bit moments."""

    @property
    def what_is_kept(self) -> str:
        """The optimizer's state, as a plan of memory names it."""
        return "AdamW moments" if self.name == "adamw" else "Muon momentum, AdamW moments"

    def check(self, *, adapted: bool) -> None:
        """Raise IsobitError for an optimizer that has nothing to do in an adapter, where one is all
        that is trained."""
        if adapted and self.name == "muon":
            raise IsobitError(
                "optimizer.name: muon is for whole matrices, and an adapter trains the two factors "
                "of each; set optimizer.name: adamw, or leave the adapter out"
            )

    def __post_init__(self) -> None:
        if self.name == "muon" and self.state == "8bit":
            raise IsobitError(
                "optimizer.state: 8bit is for AdamW's moments; Muon's momentum is kept in FP32"
            )
        if self.name != "muon":
            for key in _MUONS:
                if getattr(self, key) != getattr(OptimizerSettings, key):
                    raise IsobitError(
                        f"optimizer.{key} is Muon's: set optimizer.name: muon, or leave it out"
                    )


_MUONS = ("momentum", "nesterov", "ns_steps", "adjust_lr")
"""Options that no other optimizer reads."""


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """Return the rate of step 0, 1, ...: linear warmup, then constant, linear or cosine decay.

    Warmup reaches the peak in its last step; the decay begins at the peak and would reach
    `final_fraction` of it at step `total_steps`, one after the last.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings.schedule == "constant":
        return peak
    progress = min((step - warmup) / max(settings.total_steps - warmup, 1), 1.0)
    shape = (
        1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    )
    return peak * (settings.final_fraction + (1 - settings.final_fraction) * shape)
