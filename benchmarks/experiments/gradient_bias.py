"""How far the gradient is from the policy's own, where the policy that samples is not the one that
learns.

At fixed weights, the gradient of E[reward] over completions that the learner's own flow samples is
compared with estimates of it from completions that the rollout's flow samples, by correction. The
reward is the number of sentences (full stops), of which the gradient is large beside its noise; the
advantage is the reward less the mean of the other completions of the prompt (leave one out), and
nothing is divided by a deviation or a length, so that the on-policy estimate has no bias of its
own:

    g = E_learner[Σ A · ∇ log π(y)]        e = E_rollout[Σ A · w · ∇ log π(y)],  w by the correction

Batches b = 1 ... B are independent; batch b of both sides draws with the same seed, so completions
are the same until a token differs, and most of the noise of d_b = e_b - g_b cancels. With <,> over
pairs of *different* batches, of which none shares a token, no square has the noise's bias:

    relative bias, squared = mean <d_b, d_c> / mean <g_b, g_c>
    cosine = mean <e_b, g_c> / sqrt(mean <e_b, e_c> · mean <g_b, g_c>)

and the relative noise of one batch is that of e_b around its mean. Errors are those of the
jackknife over batches. Lengths are cut from the same completions: the first 16 tokens are a
completion of at most 16, with its own reward.

`python -m benchmarks.experiments.gradient_bias MODEL --prompt TEXT ... --out FILE` measures;
docs/experiments/gradient-bias.md shows what came out. Left out: what a biased step does to a run
over many steps, and rollouts with calibrated caches.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.command import command, of_a_model, write
from isobit import Engine, Model, Sampling
from isobit.rl.algorithm.correction import correct
from isobit.rl.algorithm.correction_rule import CorrectionRule
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from isobit.rl.learner.schedule import micro_batches

FLOWS = {
    "bf16[engines=separate]": "bf16",
    "fp8-rollout": "bf16",
    "nvfp4-rollout": "bf16",
    "fp8-e2e": "fp8-unified",
    "mxfp8-rollout": "bf16",
}
"""The precision of two engines, and the unified one whose rollout computes what its learner
does."""
RULES = {
    "none": CorrectionRule(),
    "token TIS, cap 2": CorrectionRule("token", cap=2.0),
    "sequence TIS, cap 2": CorrectionRule("sequence", cap=2.0),
    "sequence IS": CorrectionRule("sequence", cap=math.inf),
}
"""The last is unbiased, at any variance."""
ROW_BUDGET = 16384


@dataclass(frozen=True)
class Sample:
    """A completion; `group` numbers its prompt's, rollout_logprobs [tokens] are the sampler's, and
    `stops` [tokens] are the tokens that end a sentence."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    stops: tuple[bool, ...]
    group: int
    completion_mask: tuple[bool, ...] | None = None
    forks: tuple[int, ...] = ()

    def cut(self, length: int) -> "Sample":
        each = (self.completion_ids[:length], self.rollout_logprobs[:length], self.stops[:length])
        return Sample(self.prompt_ids, *each, self.group)


def advantages(samples: Sequence[Sample]) -> list[float]:
    """The reward of each, its number of sentences, less the mean of the others of its group."""
    groups: dict[int, list[int]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sum(sample.stops))
    own = (sum(sample.stops) for sample in samples)
    sizes = ((sum(groups[sample.group]), len(groups[sample.group])) for sample in samples)
    return [each - (total - each) / (count - 1) for each, (total, count) in zip(own, sizes)]


def sampled(
    model: Model, prompts: Sequence[str], group: int, new_tokens: int, seed: int
) -> list[Sample]:
    """`group` completions of every prompt, by the rollout's flow."""
    engine = Engine.sized_for(model, list(prompts), group, new_tokens)
    groups = engine.generate(list(prompts), Sampling(n=group, max_new_tokens=new_tokens, seed=seed))
    text = [model.tokenizer.decode([token]) for token in range(model.config.vocab_size)]
    found = []
    for number, completions in enumerate(groups):
        for c in completions:
            stops = tuple("." in text[token] for token in c.token_ids)
            found.append(
                Sample(
                    tuple(c.prompt_token_ids), tuple(c.token_ids), tuple(c.logprobs), stops, number
                )
            )
    return found


def _passes(model: Model, samples: Sequence[Sample]) -> Iterator[tuple[range, Tensor]]:
    """Of samples as many as fit a forward, and the learner's log-probabilities of their tokens."""
    for part in micro_batches(samples, ROW_BUDGET):
        yield part, forward(model, pack([samples[i] for i in part]), 1.0)[0]


@torch.no_grad()
def policy_logprobs(model: Model, samples: Sequence[Sample]) -> Tensor:
    """Of all tokens by the learner's flow, float32."""
    return torch.cat([found for _, found in _passes(model, samples)])


def gradient(model: Model, samples: Sequence[Sample], weights: Tensor) -> Tensor:
    """Of (1 / samples) Σ A · w · log π, all masters in one float64 vector; `weights` [tokens]
    float32, w."""
    sizes, start = advantages(samples), 0
    for part, found in _passes(model, samples):
        counts = torch.tensor([len(samples[i].completion_ids) for i in part])
        by_token = torch.tensor([sizes[i] for i in part]).repeat_interleave(counts)
        (found * by_token * weights[start : start + len(found)]).sum().backward()
        start += len(found)
    parts = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return torch.cat(parts) / len(samples)


@dataclass(frozen=True)
class Batch:
    """Gradients of one batch and length by estimator, the mismatch of its rollout, and the tokens
    in which an on-policy sampler and the learner differ, which must be none."""

    estimates: Mapping[str, Tensor]
    kl: float
    deviation: float
    tokens: int


def estimates(model: Model, samples: Sequence[Sample]) -> Batch:
    """The gradient by every rule, from completions of this model's own rollout."""
    lengths = [len(sample.completion_ids) for sample in samples]
    rollout = torch.tensor(list(chain.from_iterable(sample.rollout_logprobs for sample in samples)))
    policy = policy_logprobs(model, samples)
    ratio = (policy - rollout).double()
    by_sequence = torch.stack([part.sum() for part in ratio.split(lengths)])
    found = {
        name: gradient(model, samples, correct(rule, policy, rollout, lengths).weights)
        for name, rule in RULES.items()
    }
    k3 = float((torch.expm1(ratio) - ratio).mean())
    return Batch(found, k3, float(by_sequence.std()), len(ratio))


def on_policy(model: Model, samples: Sequence[Sample]) -> Tensor:
    """The gradient from completions of the learner's own flow. Raises RuntimeError where `samples`
    are not."""
    rollout = torch.tensor(list(chain.from_iterable(sample.rollout_logprobs for sample in samples)))
    if differing := int((policy_logprobs(model, samples) != rollout).sum()):
        raise RuntimeError(
            f"{differing} of {len(rollout)} tokens differ from the learner's: not its own samples"
        )
    return gradient(model, samples, torch.ones(len(rollout)))


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """<a_b, b_c> of all batches, with nothing where b = c: [B, B], to be summed."""
    return (a @ b.T).fill_diagonal_(0.0)


def _mean(products: Tensor, keep: Tensor) -> float:
    count = int(keep.sum())
    return float(products[keep][:, keep].sum()) / (count * (count - 1))


def summary(estimate: Tensor, wanted: Tensor) -> dict[str, Any]:
    """Cosine and squared relative bias with their errors, the latter also of the two halves of the
    batches, and the relative noise of a batch, of gradients [B, parameters]. NaN where a mean
    gradient is lost in its noise."""
    count = len(estimate)
    ee, gg, eg = _pairs(estimate, estimate), _pairs(wanted, wanted), _pairs(estimate, wanted)
    dd, norms = _pairs(estimate - wanted, estimate - wanted), (estimate * estimate).sum(1)
    every, number = torch.ones(count, dtype=torch.bool), torch.arange(count)

    def of(keep: Tensor) -> Tensor:
        e2, g2, d2 = (_mean(products, keep) for products in (ee, gg, dd))
        lengths = math.sqrt(e2 * g2) if min(e2, g2) > 0 else math.nan
        return torch.tensor(
            [_mean(eg, keep) / lengths, d2 / g2 if g2 else math.nan], dtype=torch.float64
        )

    found, without = of(every), torch.stack([of(number != left) for left in range(count)])
    errors = ((count - 1) / count * (without - without.mean(0)).square().sum(0)).sqrt()
    halves = [float(of(half)[1]) for half in (number < count // 2, number >= count // 2)]
    noise = math.sqrt(
        max(float(norms.mean()) - _mean(ee, every), 0.0) / max(_mean(gg, every), 1e-30)
    )
    return {
        "cosine": float(found[0]), "cosine_error": float(errors[0]),
        "bias_squared": float(found[1]),
        "bias_squared_error": float(errors[1]), "bias_squared_of_halves": halves,
        "noise_of_a_batch": noise,
    }  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What is measured: `batches` of len(prompts) · group completions, cut at every one of
    `lengths`."""

    model: Path
    prompts: Sequence[str]
    group: int
    batches: int
    lengths: Sequence[int]
    seed: int

    def samples(self, precision: str) -> Iterator[list[Sample]]:
        """The batches, by the rollout of a precision; the same seeds for each."""
        model = Model.load(self.model, precision)
        for batch in range(self.batches):
            yield sampled(model, self.prompts, self.group, max(self.lengths), self.seed + batch)


def measure(
    job: Job, flow: str, wanted: Mapping[int, Tensor], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Lines of one precision: every estimator at every length. `wanted`: the on-policy gradients by
    length [B, P]."""
    model, found = Model.load(job.model, flow), {length: [] for length in job.lengths}
    for number, samples in enumerate(job.samples(flow)):
        for length, batches in found.items():
            batches.append(estimates(model, [sample.cut(length) for sample in samples]))
        say(f"{flow}: batch {number + 1} of {job.batches}")
    lines = []
    for length, batches in found.items():
        mismatch = {
            "kl_k3": sum(b.kl for b in batches) / len(batches),
            "deviation": sum(b.deviation for b in batches) / len(batches),
            "tokens": sum(b.tokens for b in batches),
        }
        for name in RULES:
            stacked = torch.stack([batch.estimates[name] for batch in batches])
            line = {"flow": flow, "length": length, "estimator": name, **mismatch}
            lines.append(line | summary(stacked, wanted[length]))
    return lines


def policy_gradients(
    job: Job, flow: str, learner: str, say: Callable[[str], None]
) -> dict[int, Tensor]:
    """By length [B, P]: of the unified precision `flow`, whose samples are the own ones of the
    learner of `learner`."""
    model, found = Model.load(job.model, learner), {length: [] for length in job.lengths}
    for number, samples in enumerate(job.samples(flow)):
        for length, batches in found.items():
            batches.append(on_policy(model, [sample.cut(length) for sample in samples]))
        say(f"on-policy, {flow}: batch {number + 1} of {job.batches}")
    return {length: torch.stack(batches) for length, batches in found.items()}


def run(job: Job, flows: Sequence[str], say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """What is kept, after every flow."""
    wanted: dict[str, dict[int, Tensor]] = {}
    lines: list[dict[str, Any]] = []
    for flow in flows:
        learner = FLOWS[flow]
        if learner not in wanted:
            wanted[learner] = policy_gradients(job, learner, flow, say)
        lines += measure(job, flow, wanted[learner], say)
        yield {
            "model": job.model.name, "prompts": list(job.prompts), "group": job.group,
            "batches": job.batches,
            "completions_of_a_batch": len(job.prompts) * job.group, "seed": job.seed,
            "lines": lines,
        }  # fmt: skip


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each flow, length and estimator in Markdown."""
    names = [
        "rollout",
        "tokens",
        "deviation of log-ratios",
        "estimate",
        "squared bias",
        "of the halves",
        "cosine",
    ]
    lines = [f"| {' | '.join([*names, 'noise'])} |", "|---" * 8 + "|"]
    for line in (line for run in runs for line in run["lines"]):
        halves = ", ".join(f"{half:.3f}" for half in line["bias_squared_of_halves"])
        bias = f"{line['bias_squared']:.3f} ± {line['bias_squared_error']:.3f}"
        cosine = f"{line['cosine']:.3f} ± {line['cosine_error']:.3f}"
        cells = [
            f"`{line['flow']}`",
            str(line["length"]),
            f"{line['deviation']:.2f}",
            line["estimator"],
            bias,
            halves,
        ]
        cells += [cosine, f"{line['noise_of_a_batch']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = command(__file__, __doc__)
    of_a_model(parser)
    parser.add_argument("--group", type=int, default=16, help="completions of a prompt in a batch")
    parser.add_argument(
        "--batches", type=int, default=8, help="independent ones; at least 4, for two halves"
    )
    parser.add_argument(
        "--length", action="append", type=int, help="new tokens at most; may be given several times"
    )
    parser.add_argument(
        "--flow",
        action="append",
        choices=list(FLOWS),
        help="may be given several times; default: all",
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lengths = given.length or [16, 64, 160, 440]
    job = Job(given.model, given.prompt, given.group, given.batches, lengths, given.seed)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", file=sys.stderr, flush=True)

    for found in run(job, given.flow or list(FLOWS), say):
        write(given.out, found)


if __name__ == "__main__":
    main()
