"""The learner's forward: log-probability and entropy of every trained token, of a packed batch, of
a micro-batch by the policy, and of many micro-batches by all ranks, without a gradient.

Of targets that are not learned from, prompts' say, log-probabilities are computed without what a
backward needs, and once where several sequences share a row and its target. The bits of a row do
not depend on the rows next to it, so they are those of one forward (tests/rl/test_stepwise.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from isobit.distributed import Ranks
from isobit.kernels import Copies
from isobit.kernels.sampling.filtering import Filtering
from isobit.model import Model
from isobit.model.forward.gather_rows import copied
from isobit.model.forward.head import most_kept
from isobit.model.forward.head_divergence import Other
from isobit.model.forward.moe import RouteTape
from isobit.model.forward.recompute import Recompute
from isobit.model.weights.divided import Reached
from isobit.rl.algorithm.divergence import Divergence
from isobit.rl.algorithm.objective import ResolvedObjective
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.packing import PackedBatch, pack
from isobit.rl.learner.rounds import in_rounds
from isobit.rl.learner.routing import RoutingTotals, tape_of
from isobit.rl.learner.schedule import MicroBatches
from isobit.rl.learner.totals import Totals


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher whose whole distribution a policy is compared with, by a `divergence`."""

    model: Model
    divergence: Divergence

    @torch.no_grad()
    def reads(self, samples: Sequence[Sample], share_prompts: bool) -> Other:
        """Return the teacher's forward over the trained tokens, each after its teacher's prompt."""
        read = [
            s if s.teacher_ids is None else replace(s, prompt_ids=s.teacher_ids) for s in samples
        ]
        transformer = self.model.transformer
        packed = pack(read, share_prompts, images=transformer.images)
        hidden = transformer.hidden(packed.tokens, packed.layout, use="learner")
        hidden = rows_of(self.model, hidden, packed.rows)
        weight, cap = transformer.head_weight("learner"), self.model.config.logit_cap
        return Other(hidden, weight, self.model.ops, cap)


def rows_of(model: Model, hidden: Tensor, rows: Tensor) -> Tensor:
    """Return copies of rows of hidden states, whose gradients are added in a fixed order."""
    return copied(hidden, Copies.of(rows, len(hidden)).to(model.ops.device), model.ops)


def forward(
    model: Model,
    packed: PackedBatch,
    temperature: float,
    filtering: Filtering | None = None,
    tape: RouteTape | None = None,
    recompute: Recompute = False,
) -> tuple[Tensor, Tensor]:
    """Return (log-probability, entropy) of every trained token of a packed batch, [C] float32, by
    the learner's flow, as of `forward_compared`."""
    return forward_compared(model, packed, temperature, filtering, tape, recompute, None)[:2]


def forward_compared(
    model: Model,
    packed: PackedBatch,
    temperature: float,
    filtering: Filtering | None,
    tape: RouteTape | None,
    recompute: Recompute,
    compared: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (log-probability, entropy, what `compared` makes of hidden rows, if it is given) of
    every trained token of a packed batch, [C] float32, by the learner's flow; and the
    log-probability of what is `observed` in it, if it is, [K] float32, at temperature 1 and
    unfiltered.

    All are on the CPU, wherever the model is: what an algorithm does with single tokens happens
    there. Here a learner waits for a GPU, once per micro-batch. `tape` and `recompute` are those of
    `isobit.model.forward.layers.Pass`. Raises NonFiniteError for what an operator met there.
    """
    transformer, device = model.transformer, model.ops.device
    hidden = transformer.hidden(
        packed.tokens, packed.layout, use="learner", tape=tape, recompute=recompute
    )
    rows = rows_of(model, hidden, packed.rows)
    targets, context = packed.targets.to(device), packed.context.to(device)
    keep = len(rows) <= most_kept(len(hidden), model.config.hidden_size)
    logprobs, entropy = transformer.head_logprobs(
        rows, targets, temperature, filtering=filtering, context=context, keep=keep
    )
    distance = None if compared is None else compared(rows).cpu()
    observed = None
    if packed.observed is not None:
        observed_rows = rows_of(model, hidden, packed.observed.rows)
        observed_targets = packed.observed.targets.to(device)
        observed = transformer.head_logprobs(observed_rows, observed_targets)[0].cpu()
    results = logprobs.cpu(), entropy.cpu(), distance, observed
    model.ops.raise_faults()
    return results


def logprobs_learned(
    model: Model, packed: PackedBatch, learned: Tensor, recompute: Recompute = False
) -> Tensor:
    """Return the log-probability of every target [C] float32, on the CPU, at temperature 1, with a
    gradient of those that are `learned` [C] bool; of all where none is. Raises NonFiniteError as
    `forward_compared`."""
    if not torch.is_grad_enabled():
        learned = torch.zeros_like(learned)
    elif bool(learned.all()) or not bool(learned.any()):
        return forward(model, packed, 1.0, recompute=recompute)[0]
    transformer, device = model.transformer, model.ops.device
    hidden = transformer.hidden(packed.tokens, packed.layout, recompute=recompute)

    def of(rows: Tensor, targets: Tensor, hidden: Tensor) -> Tensor:
        rows = rows_of(model, hidden, rows)
        return transformer.head_logprobs(rows, targets.to(device))[0].cpu()

    results, size = torch.empty(len(learned)), model.config.vocab_size
    pairs = packed.rows * size + packed.targets
    distinct, inverse = torch.unique(pairs[~learned], return_inverse=True)
    with torch.no_grad():
        unlearned = of(distinct // size, distinct % size, hidden.detach())[inverse]
    results = results.masked_scatter(~learned, unlearned)
    if bool(learned.any()):
        logprobs = of(packed.rows[learned], packed.targets[learned], hidden)
        results = results.masked_scatter(learned, logprobs)
    model.ops.raise_faults()
    return results


@dataclass(frozen=True, eq=False)
class Computed:
    """The forward over a micro-batch of C trained tokens: log-probability and entropy [C] float32,
    what else was made of the hidden rows: the divergence from a teacher, or log-probabilities at
    half the temperature; the log-probability of K tokens that were `observed`, [K] float32, if
    these are learned; the routers' tape of a mixture of experts."""

    packed: PackedBatch
    logprobs: Tensor
    entropy: Tensor
    beside: Tensor | None = None
    observed: Tensor | None = None
    tape: RouteTape | None = None


@dataclass(frozen=True, eq=False)
class PolicyForward:
    """Forwards of a model over samples. `totals` takes into account what its routers do, which
    repeat the rollout's choices under the objective's `router_replay`. `sampled`: the weights are
    those that sampled, so that the routers' own choices are compared with the rollout's.
    `recompute`: keep only each layer's inputs for a backward. `plain`: of a reference, or
    supervised: no top-k or top-p, and what routers do is not looked at. `teacher`: whose
    distribution the policy's is compared with. `halves`: log-probabilities at half the temperature
    too. `observes`: with what environments said."""

    model: Model
    objective: ResolvedObjective
    totals: RoutingTotals = field(default_factory=RoutingTotals)
    sampled: bool = True
    recompute: Recompute = False
    share_prompts: bool = False
    plain: bool = False
    teacher: Teacher | None = None
    halves: bool = False
    observes: bool = False

    def __call__(self, samples: Sequence[Sample]) -> Computed:
        model, objective, tape, recorded = self.model, self.objective, None, None
        packed = pack(samples, self.share_prompts, self.observes, model.transformer.images)
        compared = self._at_half(packed) if self.halves else self._compared(samples)
        filtering = None if self.plain else objective.filtering
        experts = None if self.plain else model.config.routed
        if experts is not None:
            tape, recorded = tape_of(model, samples, objective.router_replay)
        of_tokens = forward_compared(
            model, packed, objective.temperature, filtering, tape, self.recompute, compared
        )
        if experts is not None and tape is not None:
            fresh = self.sampled and all(
                s.weights_version == model.weights_version for s in samples
            )
            choices = recorded[packed.whole] if fresh and recorded is not None else None
            self.totals.see(tape, experts.count, choices)
        return Computed(packed, *of_tokens, tape)

    @contextmanager
    def following(self, backward: bool = False, reached: Reached | None = None) -> Iterator[None]:
        """Let the ranks that hold a model together open the same for one of these forwards, and a
        `backward`, which some of them have inside this context (`DividedWeights.following`)."""
        policy, teacher = self.model.transformer.divided, None
        if self.teacher is not None:
            teacher = self.teacher.model.transformer.divided
        with ExitStack() as both:
            if teacher is not None and teacher is not policy:
                both.enter_context(teacher.following())
            if policy is not None:
                forwards = 1 if teacher is not policy else 2
                both.enter_context(policy.following(forwards, backward, reached))
            yield

    def _at_half(self, packed: PackedBatch) -> Callable[[Tensor], Tensor]:
        """Return a function that computes log-probabilities at half the temperature of hidden
        rows."""
        transformer, targets = self.model.transformer, packed.targets.to(self.model.ops.device)
        half = self.objective.temperature / 2
        return lambda rows: transformer.head_logprobs(rows, targets, half)[0]

    def _compared(self, samples: Sequence[Sample]) -> Callable[[Tensor], Tensor] | None:
        """Return a function that compares hidden rows with the teacher's, whose forward comes
        first."""
        if self.teacher is None:
            return None
        temperature, divergence = self.objective.temperature, self.teacher.divergence
        teacher_rows = self.teacher.reads(samples, self.share_prompts)
        return lambda rows: self.model.transformer.head_divergence(
            rows, teacher_rows, lambda mine, theirs: divergence.of(mine, theirs, temperature)
        )


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The results of one micro-batch besides its gradient: sums over its tokens, its routers', and
    the policy's log-probabilities [its trained tokens]."""

    totals: Totals
    routing: RoutingTotals
    logprobs: Tensor


@torch.no_grad()
def values_of(
    policy: PolicyForward,
    samples: Sequence[Sample],
    parts: MicroBatches,
    ranks: Ranks,
    read: Callable[[Computed], Tensor] = lambda computed: computed.logprobs,
) -> tuple[dict[int, Tensor], Totals]:
    """Return the log-probabilities, or what else is `read` of the forward, [trained tokens] of the
    samples of these micro-batches, by index; and sums over all of them. Every rank computes some
    micro-batches."""
    mine: dict[int, MicroBatch] = {}

    def compute(index: int) -> None:
        routing, totals = RoutingTotals(), Totals()
        batch = replace(policy, totals=routing)([samples[i] for i in parts[index]])
        totals.see(batch.entropy)
        mine[index] = MicroBatch(totals, routing, read(batch))

    in_rounds(policy.following, len(parts), ranks, compute)
    results, sums = dict[int, Tensor](), Totals()
    for index, micro in sorted(gather_micro_batches(ranks, mine).items()):
        sums.merge(micro.totals)
        policy.totals.merge(micro.routing)
        lengths = [samples[i].num_trained for i in parts[index]]
        results |= zip(parts[index], micro.logprobs.split(lengths))
    return results, sums


def gather_micro_batches(ranks: Ranks, mine: Mapping[int, MicroBatch]) -> dict[int, MicroBatch]:
    """Return the micro-batches of all ranks, by index."""
    if ranks.size == 1:
        return dict(mine)
    numbers, tensors = [], dict[str, Tensor]()
    for index, micro in mine.items():
        routing = micro.routing
        numbers.append([index, vars(micro.totals), routing.differing, routing.compared])
        tensors |= {f"{index}.logprobs": micro.logprobs}
        tensors |= {f"{index}.probabilities": routing.probabilities}
        tensors |= {} if routing.load is None else {f"{index}.load": routing.load}
    micro_batches: dict[int, MicroBatch] = {}
    sent = zip(ranks.all_gather_json(numbers), ranks.all_gather_tensors(tensors))
    for index, totals, differing, compared, rows in (
        (*values, rows) for numbers, rows in sent for values in numbers
    ):
        of_routers = rows.get(f"{index}.load"), rows[f"{index}.probabilities"]
        routing = RoutingTotals(*of_routers, differing, compared)
        micro_batches[index] = MicroBatch(Totals(**totals), routing, rows[f"{index}.logprobs"])
    return micro_batches
