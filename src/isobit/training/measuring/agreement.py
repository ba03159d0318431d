"""What a run does when a token differs that must not: the line that ends it, or the one that
warns."""

from collections.abc import Mapping
from pathlib import Path

from isobit.config import Config, load_run_config
from isobit.errors import Corruption, NonFiniteError, RunFailed
from isobit.evaluation.inspection.locate import locate
from isobit.options.consistency import level
from isobit.options.declare import options_of
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.agreement import Disagreement
from isobit.rl.learner.batch import sample_key
from isobit.rl.learner.learner import Learner
from isobit.rl.learner.schedule import micro_batches
from isobit.run import checkpoints
from isobit.run import directory as runs


def failure(
    learner: Learner, run: Path, recorded: bool, mismatch: Disagreement, step: int, unlearned: bool
) -> RunFailed:
    """Build the error that ends a run under `on_mismatch: stop`, in one line. `recorded`: the run
    learns from recorded rollouts; `unlearned`: this step has not learned yet, so the one before is
    saved."""
    first, sample = mismatch.first, mismatch.first.sample
    saved = checkpoints.all_checkpoints(run / runs.CHECKPOINTS)
    last = (
        checkpoints.path_of(run / runs.CHECKPOINTS, step - 1)
        if unlearned or not saved
        else saved[-1]
    )
    again = (
        "isobit train --from-rollouts RECORDED --out DIR"
        if recorded
        else f"isobit train --resume {run}"
    )
    return RunFailed(
        f"step {step}: rollout and learner differ in {mismatch.differing} of {mismatch.compared} tokens, "
        f"and {learner.model.precision.name} promises the same bits; first: prompt "
        f"{sample.prompt_index}, sample {sample.sample_index}, token {first.position} of the "
        f"completion, log-probability {first.rollout!r} in the rollout and {first.learner!r} in "
        f"the learner; {_where(mismatch, learner)}; nothing was learned from this batch; the last "
        f"good checkpoint is {last}; go on with: {again} on_mismatch=warn"
    )


def warning_of(learned: Mapping[str, float], learner: Learner, step: int) -> str | None:
    """Return the warning for a step that learned from tokens whose bits differ; None if none
    differed."""
    differing = learned.get("mismatch/differing_tokens", 0.0)
    corrected = learned.get("mismatch/corrected", 0.0) > 0
    if not (learner.expects_equal_bits and (differing or corrected)):
        return None
    handling = "weighed by token TIS" if corrected else "learned from nonetheless"
    of = f"{differing:.0f} of {learned['mismatch/compared_tokens']:.0f} tokens"
    return (
        f"warning: step {step}: rollout and learner differ in {of}: {handling} (on_mismatch: "
        f"{learner.on_mismatch})"
    )


def _where(mismatch: Disagreement, learner: Learner) -> str:
    """Describe where rollout and learner first differ: a weight that changed in memory, else the
    layer and operator, else what it means that no operator differs."""
    first, batch = mismatch.first, mismatch.batch
    try:
        learner.check_memory()
    except Corruption as changed:
        return str(changed)
    index = next(i for i, sample in enumerate(batch) if _is_of(sample, first.sample))
    span = next(
        block
        for block in micro_batches(batch, learner.micro_batch_tokens, learner.share_prompts)
        if index in block
    )
    inputs = [
        list(tokens[:-1] if batch[i].completion_ids else tokens)
        for i in span
        for tokens in batch[i].contexts
    ]
    prefix = list(first.sample.before(first.position))
    target = first.sample.completion_ids[first.position]
    forks = sum(fork <= first.position for fork in first.sample.forks)
    try:
        objective = learner.objective
        row = sum(len(batch[i].contexts) for i in range(span.start, index)) + forks
        located = locate(
            learner.model, prefix, target, inputs, row, objective.temperature, objective.filtering
        )
    except NonFiniteError as error:
        return f"computed anew, the sequence fails: {error}"
    if located.difference is not None:
        return located.difference
    sides = {first.rollout: "the rollout", first.learner: "the learner"}
    agrees = sides.get(located.logprob, "neither")
    reason = ": the rollout had other weights, scales or keys" if agrees == "the learner" else ""
    return (
        "not reproduced: alone, in its batch and token by token the sequence agrees with "
        f"{agrees}{reason}"
    )


def _is_of(sample: Sample, compared: Sample) -> bool:
    """Return whether a sample is the one that was compared, or the one whose newest segment was."""
    return sample is compared or (
        bool(compared.segments) and sample_key(sample) == sample_key(compared)
    )


def unlike(recorded: Path, config: Config, machine: Mapping[str, object]) -> list[str]:
    """Return the sections of the config and the facts of the machine by which a replay computes
    other bits than the recorded run."""
    original = load_run_config(recorded)
    free = {
        "run",
        "ranks",
        "divided",
        "tracking",
        "evaluation",
        "rewards",
        "engine",
        "backend",
        "on_mismatch",
        "mismatch",
    }
    if config.optimizer.schedule == "constant":
        free.add("steps")
    if level(original.consistency) == level(config.consistency):
        free.add("consistency")  # the machine's order says whether it is the same one
    sections = [
        n
        for n in options_of(Config)
        if n not in free and getattr(original, n) != getattr(config, n)
    ]
    facts, ignored = (
        runs.began_by(recorded),
        {"why", "consistency", "bitwise"},
    )  # the last two by the config
    return sections + [
        name
        for name, value in machine.items()
        if name not in ignored and facts.get(name, value) != value
    ]
