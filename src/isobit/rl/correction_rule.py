"""What a correction of the difference between rollout and learner is: a weight, a rejection, or both.

All of it is a function of lr = log π_old - log π_rollout of each token, clamped to ±20 before any exponential (veRL's
safety bound). Bounds on `ratio` are bounds on π_old/π_rollout, those on `inverse_ratio` bounds on π_rollout/π_old, as
in veRL's modes `*_k1`. How a rule is applied: `correction.py`.

Sources: token and sequence TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"; masks: Liu et al. 2025, "When speed kills stability"; IcePop: Ling team 2025; KPop, which is binary_kl per
token: Guo et al. 2026, as AReaL's `compute_binary_kl_divergence` writes it.
"""

import math
from dataclasses import dataclass, fields

DENOMINATORS = ("all", "kept")
WEIGHTS = ("none", "token", "sequence")
MEASURES = ("ratio", "inverse_ratio", "k1", "k2", "k3", "binary_kl")
LEVELS = ("token", "sequence_sum", "sequence_mean", "sequence_max")


@dataclass(frozen=True)
class Rejection:
    """Keep what has `low` <= value <= `high`.

    `measure` per token: ratio = exp(lr), inverse_ratio = exp(-lr), k1 = -lr, k2 = lr²/2, k3 = exp(lr) - 1 - lr, and
    binary_kl = max(KL(p ‖ q), KL(q ‖ p)) of the two events "this token" and "any other", whose probability is p under
    the old policy and q under the rollout's, both within [1e-8, 1 - 1e-8]. `level`: the token's own value, or that of
    its sequence: the sum, the mean or the maximum over its tokens. A sequence's ratio is exp of the sum or of the mean
    (the geometric mean) of lr; its maximum is that of the tokens' ratios.
    """

    measure: str = "ratio"
    level: str = "token"
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class CorrectionRule:
    """`weight`: none (1), token (exp(lr)) or sequence (exp of the sum of lr, for all its tokens); clamped to [`floor`,
    `cap`], floor at least 0; with `normalize` divided by its mean over the batch before anything is rejected: over all
    tokens, or, for weights of sequences, over all sequences that have tokens. `rejection`, and `veto`, in [0, 1): a
    sequence is rejected if any of its tokens has a ratio below it. `denominator`: the loss is averaged over all tokens,
    or over those that are kept, and then a penalty in the loss is too (veRL, whose mask of the response loses what is
    rejected)."""

    weight: str = "none"
    cap: float = math.inf
    floor: float = 0.0
    normalize: bool = False
    rejection: Rejection | None = None
    veto: float = 0.0
    denominator: str = "all"

    @property
    def active(self) -> bool:
        return self != CorrectionRule()

    def __str__(self) -> str:
        named = [name for name, rule in CORRECTIONS.items() if rule == self]
        changed = [f"{f.name}={v}" for f in fields(self) if (v := getattr(self, f.name)) != f.default]
        return named[0] if named else ", ".join(changed)


CORRECTIONS: dict[str, CorrectionRule] = {
    "none": CorrectionRule(),
    "token_tis": CorrectionRule("token", cap=2.0),
    "sequence_tis": CorrectionRule("sequence", cap=2.0),
    "token_mis": CorrectionRule("token", rejection=Rejection("ratio", "token", 0.5, 5.0)),
    "sequence_mis": CorrectionRule("sequence", cap=2.0, rejection=Rejection("ratio", "sequence_sum", 0.5, 2.0)),
    "geometric_mask": CorrectionRule("token", rejection=Rejection("ratio", "sequence_mean", 0.999, 1.002)),
    "k3_mask": CorrectionRule(rejection=Rejection("k3", "sequence_mean", high=0.01)),
    "binary_kl_mask": CorrectionRule(rejection=Rejection("binary_kl", "token", high=0.1)),
}
"""Named rules with the field's defaults; token_mis is IcePop, geometric_mask seq-mask-TIS, binary_kl_mask KPop."""
