"""What a correction of the difference between rollout and learner is: a weight, a rejection, or
both.

All of it is a function of lr = log π_old - log π_rollout of each token, clamped to ±20 before any
exponential (verl's safety bound). Bounds on `ratio` are bounds on π_old/π_rollout, those on
`inverse_ratio` bounds on π_rollout/π_old, as in verl's modes `*_k1`. How a rule is applied:
`correction.py`.

Sources: token and sequence TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training"; masks: Liu et al. 2025, "When speed kills stability"; IcePop: Ling team
2025; KPop, which is binary_kl per token: Guo et al. 2026, as AReaL's `compute_binary_kl_divergence`
writes it.
"""

from dataclasses import dataclass, fields
from typing import Annotated

from isobit.errors import IsobitError
from isobit.options.declare import OneOf, above, at_least, below

DENOMINATORS = ("all", "kept")
WEIGHTS = ("none", "token", "sequence")
MEASURES = ("ratio", "inverse_ratio", "k1", "k2", "k3", "binary_kl")
LEVELS = ("token", "sequence_sum", "sequence_mean", "sequence_max")


@dataclass(frozen=True)
class Rejection:
    """The rule by which a correction leaves out tokens or sequences: those whose value is outside
    [low, high].

    `measure` per token: ratio = exp(lr), inverse_ratio = exp(-lr), k1 = -lr, k2 = lr²/2, k3 =
    exp(lr) - 1 - lr, and binary_kl = max(KL(p ‖ q), KL(q ‖ p)) of the two events "this token" and
    "any other", whose probability is p under the old policy and q under the rollout's, both within
    [1e-8, 1 - 1e-8]. `level`: the token's own value, or that of its sequence: the sum, the mean or
    the maximum over its tokens. A sequence's ratio is exp of the sum or of the mean (the geometric
    mean) of lr; its maximum is that of the tokens' ratios.
    """

    measure: Annotated[
        str,
        OneOf(MEASURES),
        "what is bounded, of learner to rollout. inverse_ratio: of rollout to learner, which "
        "verl's k1 modes bound",
    ] = "ratio"
    level: Annotated[
        str,
        OneOf(LEVELS),
        "what is left out: a token by its own measure, or a sequence by the sum, the mean or the "
        "largest over its tokens",
    ] = "token"
    low: Annotated[float | None, "the smallest value that is kept; default: no bound"] = None
    high: Annotated[float | None, "the largest value that is kept; default: no bound"] = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise IsobitError("give low, high, or both: bounds of what is kept")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise IsobitError(f"low {self.low} exceeds high {self.high}")


@dataclass(frozen=True)
class CorrectionRule:
    """A custom correction: a weight, a rejection, or both.

    `weight`: none (1), token (exp(lr)) or sequence (exp of the sum of lr, for all its tokens);
    clamped to [`floor`, `cap`]; with `normalize` divided by its mean over the batch before anything
    is rejected: over all tokens, or, for weights of sequences, over all sequences that have tokens.
    `rejection`, and `veto`: a sequence is rejected if any of its tokens has a ratio below it.
    `denominator`: the loss is averaged over all tokens, or over those that are kept, and then a
    penalty in the loss is too (verl, whose mask of the response loses what is rejected)."""

    weight: Annotated[
        str, OneOf(WEIGHTS), "what a token's loss is multiplied by: 1, its ratio, or its sequence's"
    ] = "none"
    cap: Annotated[float | None, above(0), "largest weight; default: none"] = None
    floor: Annotated[float, at_least(0), "smallest weight"] = 0.0
    normalize: Annotated[
        bool, "divide weights by their mean over the batch, rejected ones included"
    ] = False
    rejection: Rejection | None = None
    veto: Annotated[
        float, at_least(0), below(1), "reject a sequence if any token's ratio is below this; 0: off"
    ] = 0.0
    denominator: Annotated[
        str,
        OneOf(DENOMINATORS),
        "average the loss over all tokens, or over those that are kept, as verl does",
    ] = "all"

    def __post_init__(self) -> None:
        if self.cap is not None and self.floor > self.cap:
            raise IsobitError(f"floor {self.floor} exceeds cap {self.cap}")
        if self.weight == "none" and (self.cap is not None or self.floor or self.normalize):
            raise IsobitError("cap, floor and normalize need a weight: token or sequence")
        if self.denominator == "kept" and self.rejection is None and not self.veto:
            raise IsobitError(
                "denominator: kept needs a rejection or a veto, which leave something out"
            )

    @property
    def active(self) -> bool:
        return self != CorrectionRule()

    @property
    def of_batch(self) -> bool:
        """Whether it does more than weigh each sample by itself: a mean over the batch, or what it
        may reject."""
        return self.normalize or self.rejection is not None or self.veto > 0

    def __str__(self) -> str:
        named = [name for name, rule in CORRECTIONS.items() if rule == self]
        changed = [
            f"{f.name}={v}" for f in fields(self) if (v := getattr(self, f.name)) != f.default
        ]
        return named[0] if named else ", ".join(changed)


CORRECTIONS: dict[str, CorrectionRule] = {
    "none": CorrectionRule(),
    "token_tis": CorrectionRule("token", cap=2.0),
    "token_is": CorrectionRule("token"),
    "sequence_tis": CorrectionRule("sequence", cap=2.0),
    "token_mis": CorrectionRule("token", rejection=Rejection("ratio", "token", 0.5, 5.0)),
    "sequence_mis": CorrectionRule(
        "sequence", cap=2.0, rejection=Rejection("ratio", "sequence_sum", 0.5, 2.0)
    ),
    "geometric_mask": CorrectionRule(
        "token", rejection=Rejection("ratio", "sequence_mean", 0.999, 1.002)
    ),
    "k3_mask": CorrectionRule(rejection=Rejection("k3", "sequence_mean", high=0.01)),
    "binary_kl_mask": CorrectionRule(rejection=Rejection("binary_kl", "token", high=0.1)),
}
"""Named rules with the field's defaults; token_is is NeMo RL's, token_mis is IcePop, geometric_mask seq-mask-TIS,
binary_kl_mask KPop."""
