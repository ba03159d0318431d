"""Seconds of a training step, by part: bytes and operations (`work.py`) at calibrated rates (`devices.py`); traffic.

Completions end earlier or later; the share that still runs at token t of at most M is (1 - t / M)^a, with a such that
the mean is the given one. The slowest rank counts, and its rollout ends with the longest completion. A frozen model has
no WGrad; what its adapter multiplies is left out, and so are calibration of a KV cache, evaluation and
checkpoints; rewards are computed beside the rollout.
"""

from dataclasses import dataclass

from isobit.model.weights.masters import MASTERS
from isobit.plan import traffic
from isobit.plan.devices import FACTORS, Factors, rates
from isobit.plan.job import Job
from isobit.plan.memory import Memory, largest_share, moment_bytes, num_parameters
from isobit.plan.work import Phase, Work, decode, floor, learn, prefill, score, share_again, update

_POINTS = 64  # of the decline of running sequences


@dataclass(frozen=True)
class Seconds:
    """Of a step. `logprobs`: old ones and the reference's; `exchange`: of all gradients, of which `exposed` is not
    hidden behind the backward; `exchange` is no part of the total."""

    rollout: float
    logprobs: float
    learn: float
    exchange: float
    exposed: float
    update: float
    sync: float

    @property
    def total(self) -> float:
        return self.rollout + self.logprobs + self.learn + self.exposed + self.update + self.sync


def seconds(job: Job, memory: Memory, factors: Factors = FACTORS) -> Seconds:
    """The seconds of a step of a run that fits."""
    rounds = job.updates * job.rounds
    forward_and_backward = micro_batch(job, factors)
    sent, shown = exchange(job, factors) if job.ranks > 1 else (0.0, 0.0)
    return Seconds(
        rollout=rollout(job, memory, factors),
        logprobs=logprobs(job, factors),
        learn=rounds * forward_and_backward,
        exchange=rounds * sent,
        exposed=rounds * shown,
        update=job.updates * _time(job, {"optimizer": _update(job)}, factors),
        sync=job.updates * sync(job, factors),
    )


def exchange(job: Job, factors: Factors = FACTORS) -> tuple[float, float]:
    """Of one round's gradients: all of it, and what the backward does not hide."""
    # a third of a micro-batch is its forward, or a quarter where the backward runs all of that again
    again = share_again(job.model, job.config.optimizer.activation_checkpointing)
    share = (2 + again) / (3 + again)
    sent = traffic.exchange(job).seconds
    return sent, traffic.exposed(sent, share * micro_batch(job, factors), traffic.buckets(job.model))


def micro_batch(job: Job, factors: Factors = FACTORS) -> float:
    """Forward and backward of one."""
    tokens = job.sequences_of_a_micro_batch * job.rows_of_a_sequence
    checkpointing = job.config.optimizer.activation_checkpointing
    frozen = job.config.adapter is not None
    phase = learn(job.model, job.precision, tokens, job.lengths.sequence, checkpointing, frozen)
    phase.pop("optimizer")
    return _time(job, phase, factors)


def logprobs(job: Job, factors: Factors = FACTORS) -> float:
    """Forwards over all samples of a step: of old weights, where the learner computes them, and of the reference."""
    tokens = -(-job.completions // job.ranks) * job.rows_of_a_sequence
    flows = [(job.model, job.precision)] * job.recompute_old + ([] if job.reference is None else [job.reference])
    return sum(_time(job, score(*each, tokens, job.lengths.sequence), factors) for each in flows)


def sync(job: Job, factors: Factors = FACTORS) -> float:
    """Quantize this rank's rows, and gather everybody's. A second engine receives its copy besides."""
    size, shard = traffic.synced_bytes(job), _share(job)
    copies = 1 if job.precision.shared else 2
    moved = 4.0 * shard + size * shard / num_parameters(job.model, job.config.adapter) + (copies - 1) * 2 * size
    gathered = traffic.gather(job).seconds if job.ranks > 1 else 0.0
    return moved / (factors.copy * job.device.bandwidth) + gathered


def rollout(job: Job, memory: Memory, factors: Factors = FACTORS) -> float:
    """The prompts' prefill, then decoding: as many sequences at a time as the engine and its cache take, until the last
    have started; then fewer and fewer."""
    lengths, sequences, together = job.lengths, job.completions_of_a_rank, running(job, memory)
    decline = lengths.longest / lengths.mean - 1
    context = lengths.prompt + lengths.longest / (decline + 2)
    full = max(0.0, sequences - together) * lengths.mean / together * step(job, together, context, factors)
    width = lengths.longest / _POINTS
    ends = 0.0
    for point in range(_POINTS):
        at = (point + 0.5) / _POINTS
        left = max(1.0, together * (1 - at) ** decline)
        ends += width * step(job, left, lengths.prompt + at * lengths.longest, factors)
    prompts = -(-job.config.prompts_per_step // job.ranks)
    return full + ends + _time(job, prefill(job.model, job.precision, prompts, lengths.prompt), factors)


def running(job: Job, memory: Memory) -> float:
    """Sequences that decode at a time, as long as there are that many."""
    held = memory.cache_tokens / job.lengths.sequence
    return max(1.0, min(job.completions_of_a_rank, job.config.engine.max_sequences, held))


def step(job: Job, batch: float, context: float, factors: Factors = FACTORS) -> float:
    """A token for each of `batch` sequences."""
    phase = decode(job.model, job.precision, batch, context)
    return _time(job, phase, factors) + job.model.num_layers * factors.layer_s + factors.step_s


def _update(job: Job) -> Work:
    options, adapter = job.config.optimizer, job.config.adapter
    moments = moment_bytes(job.model, options, adapter) / num_parameters(job.model, adapter)
    return update(_share(job), MASTERS[options.masters].itemsize, moments)


def _share(job: Job) -> int:
    return largest_share(job.model, job.ranks, job.config.adapter)


def _time(job: Job, phase: Phase, factors: Factors) -> float:
    experts, low = job.model.experts is not None, job.precision.rollout.kv is not None
    return floor(phase, rates(job.device, factors, experts=experts, cache_fp8=low))
