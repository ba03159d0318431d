"""Sums over the optimizer steps of a batch, and the metrics made of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from isobit.kernels.reference.sums import total
from isobit.rl.algorithm.loss import LossOutputs


@dataclass(eq=False)
class Totals:
    """Sums over the tokens of one or more optimizer steps, and the norm of each step's gradient.
    `named` are sums of the loss function's own metrics. `tokens` are trained tokens, `computed`
    those with a forward, whose `entropy` is known; `rows` are the tokens of prompts and
    completions, `rows_left_out` those without a backward, `rows_shared` those of prompts that were
    computed for an earlier completion; `observed` tokens that environments said, whose
    cross-entropies add up to `observation`."""

    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    tokens: int = 0
    computed: int = 0
    rows: int = 0
    rows_left_out: int = 0
    rows_shared: int = 0
    observed: int = 0
    observation: float = 0.0
    named: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def count(self, loss: Tensor, outputs: LossOutputs, entropy: Tensor, kl: Tensor | None) -> None:
        """Add a micro-batch: its part of the loss, and [T] tensors of its tokens."""
        self.loss += float(loss.detach())
        self.see(entropy)
        if kl is not None:
            self.kl += total(kl)
        if outputs.clipped is not None:
            self.clipped += int(outputs.clipped.sum())
        self._add_named({name: total(values) for name, values in outputs.metrics.items()})

    def see(self, entropy: Tensor) -> None:
        """Add the forward of a micro-batch: the entropy [T] of its tokens."""
        self.entropy += total(entropy)
        self.computed += len(entropy)

    def observe(self, cross_entropy: Tensor) -> None:
        """Add what environments said in a micro-batch: the cross-entropy [K] of its tokens."""
        self.observation += total(cross_entropy)
        self.observed += len(cross_entropy)

    def merge(self, other: "Totals") -> None:
        """Add the sums of another `Totals`: those of a later micro-batch, say."""
        for name, value in vars(other).items():
            if isinstance(value, (int, float)):
                setattr(self, name, getattr(self, name) + value)
        self._add_named(other.named)

    def add(self, step: "Totals", norm: float) -> None:
        """Add an optimizer step, whose gradient had this norm."""
        self.merge(step)
        self.norms.append(norm)

    def _add_named(self, sums: Mapping[str, float]) -> None:
        for name, value in sums.items():
            self.named[name] = self.named.get(name, 0.0) + value

    @property
    def mean_entropy(self) -> float:
        """The mean entropy of the tokens that were computed; NaN where there are none."""
        return self.entropy / (self.computed or math.nan)

    def metrics(self, rate: float) -> dict[str, float]:
        """Return the metrics of these sums; means over steps or tokens are NaN where there are
        none."""
        tokens, steps = self.tokens or math.nan, len(self.norms) or math.nan
        return {
            "loss/policy": self.loss / steps,
            "loss/kl": self.kl / tokens,
            "entropy": self.mean_entropy,
            "clip_fraction": self.clipped / tokens,
            "grad_norm": sum(self.norms) / steps,
            "learn/skipped_share": self.rows_left_out / (self.rows or math.nan),
            "learn/shared_share": self.rows_shared / (self.rows or math.nan),
            "learning_rate": rate,
            "steps/skipped": float(self.skipped),
            **({"loss/observation": self.observation / self.observed} if self.observed else {}),
            **{f"loss/{name}": value / tokens for name, value in self.named.items()},
        }
