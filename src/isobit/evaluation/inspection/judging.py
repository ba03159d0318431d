"""How far a precision flow moves the scores of a reward model, and how that changes advantages.

Completions are scored in BF16 and under the flow. Learning depends on the order inside a group and
the sign of each advantage: Kendall's tau (Kendall 1938; tau-a, so that a tie counts as neither) and
the fraction of samples whose r - mean changes its sign.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from isobit.engine.prompts import Prompt
from isobit.engine.types import Completion
from isobit.errors import IsobitError
from isobit.model import RewardModel


@dataclass(frozen=True)
class Judgement:
    """A flow's mean |score - BF16's| over the scores' spread, mean tau of the groups, fraction of
    advantages with another sign, and the model's memory in MiB."""

    preset: str
    relative_shift: float
    kendall_tau: float
    sign_flips: float
    mib: float


def judge(
    path: str,
    presets: Sequence[str],
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    n: int,
) -> list[Judgement]:
    """Score the completions, `n` of each prompt in order, under BF16 and under each flow.

    Raises IsobitError for a bad reward model, and for prompts that are token ids, which it could
    not read.
    """
    texts = [prompts[i // n] for i in range(len(completions))]
    for prompt in texts:
        if not isinstance(prompt, str) and not all(isinstance(message, dict) for message in prompt):
            raise IsobitError(
                "--reward-model needs prompts in text or chat messages: give --prompts FILE"
            )
    exact = RewardModel.load(path, "bf16")
    sequences = [exact.encode(p, c.text) for p, c in zip(texts, completions)]  # type: ignore[arg-type]
    reference = exact.score(sequences)
    judgements = []
    for preset in presets:
        model = RewardModel.load(path, preset)
        judgements.append(
            compare_scores(preset, reference, model.score(sequences), n, model.nbytes() / 2**20)
        )
    return judgements


def compare_scores(
    preset: str, reference: Sequence[float], scores: Sequence[float], n: int, mib: float
) -> Judgement:
    """Compare another flow's scores with the reference, in groups of `n`."""
    spread = max(reference) - min(reference)
    shift = sum(abs(a - b) for a, b in zip(reference, scores)) / len(scores)
    taus, flips = [], 0
    for start in range(0, len(scores), n):
        expected, actual = reference[start : start + n], scores[start : start + n]
        taus.append(kendall_tau(expected, actual))
        middles = sum(expected) / n, sum(actual) / n
        flips += sum((a - middles[0]) * (b - middles[1]) < 0 for a, b in zip(expected, actual))
    return Judgement(
        preset, shift / spread if spread else 0.0, sum(taus) / len(taus), flips / len(scores), mib
    )


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Return (concordant - discordant pairs) / all pairs; 1 for a group of one."""
    pairs = list(combinations(range(len(left)), 2))
    products = [(left[i] - left[j]) * (right[i] - right[j]) for i, j in pairs]
    return sum((p > 0) - (p < 0) for p in products) / len(pairs) if pairs else 1.0
