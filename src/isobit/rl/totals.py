"""What is summed over the optimizer steps of a batch, and the metrics made of it."""

import math
from dataclasses import dataclass, field, fields


@dataclass(eq=False)
class Totals:
    """Sums over the tokens of one or more optimizer steps, and the norm of each step's gradient."""

    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    tokens: int = 0
    norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def add(self, other: "Totals") -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def metrics(self, rate: float) -> dict[str, float]:
        """NaN where no step was taken."""
        tokens, steps = self.tokens or math.nan, len(self.norms) or math.nan
        return {
            "loss/policy": self.loss / steps,
            "loss/kl": self.kl / tokens,
            "entropy": self.entropy / tokens,
            "clip_fraction": self.clipped / tokens,
            "grad_norm": sum(self.norms) / steps,
            "learning_rate": rate,
            "steps/skipped": float(self.skipped),
        }
