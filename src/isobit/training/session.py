"""An open training run: everything that the loop of `loop.py` works with, and the six verbs themselves.

Its state (step, data cursor, groups left over, version of the weights, length of the
files) is what a checkpoint holds beside weights and optimizer. Left out: the algorithm (`loop.py`, `rl/`),
and how a run is opened (`opening.py`).
"""

import math
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

from isobit.engine import Completion
from isobit.errors import IsobitError, NonFiniteError, RunFailed
from isobit.evaluation.best import Best
from isobit.options import plain
from isobit.report import write_report
from isobit.rl import Group, Sample
from isobit.rl.advantages import Advantage
from isobit.rl.agreement import Disagreement
from isobit.rl.collect import StepBatch
from isobit.rl.correction import small_step
from isobit.rl.learner import Learned
from isobit.run import checkpoints
from isobit.run import directory as runs
from isobit.run.directory import Interruption, Run
from isobit.trackers.process import Trackers
from isobit.training.agreement import failure, warning_of
from isobit.training.lengths import endless
from isobit.training.objects import OnStep
from isobit.training.parts import Parts, save_checkpoint
from isobit.training.plan import too_large
from isobit.training.quantization import LearnerTotals
from isobit.training.recording import rows_of
from isobit.training.scoring import RolloutScoring
from isobit.training.snapshot import Snapshot, State
from isobit.training.statistics import PeakMemory, WeightTotals, batch_metrics, recorded, staleness_metrics
from isobit.view import Display, Shown


class Session:
    """Use as a context manager. Between the verbs of one step, times and counts gather in `_metrics`."""

    def __init__(
        self,
        parts: Parts,
        run: Run,
        state: State,
        *,
        quiet: bool,
        recorded: Iterator[list[Group]] | None = None,
        callbacks: Sequence[OnStep] = (),
    ) -> None:
        self.config, self.parts, self.run, self.state = parts.config, parts, run, state
        self.model, self.objective, self.quiet = parts.model, parts.objective, quiet
        evaluation = self.config.evaluation
        self.best = Best(
            run.directory, evaluation.best_by if evaluation.every and evaluation.keep_best else None, parts.model.save
        )
        self._changed = run.record_machine(parts.machine())
        self.interruption = Interruption()
        details = f"{self.model.precision.name}, {self.config.consistency}"
        self.display = Display(self.config.steps, quiet, state.step, run.directory.name, details)
        self.trackers = Trackers(
            plain(self.config.tracking),
            plain(self.config),
            run.directory,
            exit_code=lambda: self.interruption.exit_code,
            say=self.display.note,
        )
        self._recorded, self._callbacks = recorded, callbacks
        self._scoring: RolloutScoring | None = None
        self._peaks = PeakMemory(self.model.ops.device)
        self._metrics: dict[str, float] = {}
        self._weights: WeightTotals
        self._learner_totals: LearnerTotals
        self._began = 0.0
        self._warned = False
        self.saved_step: int | None = None
        self._whole: Snapshot | None = None  # what the weights belong to, until a step learns
        self._stack = ExitStack()

    def __enter__(self) -> "Session":
        with ExitStack() as stack:
            for resource_ in (self.run, self.parts.rewards, self.interruption, self.display, self.trackers):
                stack.enter_context(resource_)
            self._begin()
            self._stack = stack.pop_all()
        return self

    def _begin(self) -> None:
        """Say what computes, know what was done before, and record what is due before the first step."""
        self.parts.rewards.output.path = self.run.directory / runs.REWARDS_LOG
        self.display.note(f"{self.model.ops.why}; consistency: {self.config.consistency}")
        for warning in (*self._changed, endless(self.model, self.config.sampling), too_large(self.parts)):
            if warning is not None:
                self.display.note(warning)
        for row in runs.read_jsonl(self.run.directory / runs.METRICS):  # of a resumed run: what it had done
            self.display.history.add(row)
        if self.saved_step is None:
            self.display.history.add(self._evaluate_and_write(self.state.step))
            self._save()
        elif self.state.unrecorded is not None:
            self.display.history.add(self._finish_step(self.state.unrecorded))
            self._save()
        self._whole = self._snapshot()

    def __exit__(self, *raised: Any) -> None:
        try:
            error = raised[1]
            if self._whole is not None and isinstance(error, IsobitError) and not isinstance(error, NonFiniteError):
                self._save_whole(self._whole, error)
        finally:
            self._stack.__exit__(*raised)

    @property
    def unfinished(self) -> bool:
        return self.state.step < self.config.steps and self.interruption.signal is None

    def sync(self) -> None:
        """Verb 1: the working weights become those of the masters."""
        self._metrics, self._began = {}, time.perf_counter()
        self._refresh()
        self._metrics["sync/bytes"] = float(self.model.transformer.sync_bytes)
        self._weights = WeightTotals(self.model)
        self._metrics |= self._weights.metrics() | self.parts.calibrator.step_metrics()

    def _refresh(self) -> None:
        """The working weights become those of the masters, and the scales of a calibrated KV cache fit them; reward
        functions learn which step it is."""
        counted = {"global_step": self.state.step, "max_steps": self.config.steps}
        self.parts.rewards.trainer_state = counted | {"epoch": self.state.cursor / len(self.parts.task.train)}
        with self._timed("sync"), self._broken_weights_end_the_run():
            self.model.sync()
        if self.parts.calibrator.active:
            count = self.model.precision.calibration.prompts
            first = self.state.cursor
            with self._timed("calibrate"), self._broken_weights_end_the_run():
                self.parts.calibrator.calibrate([self.parts.task.train.at(first + i).prompt for i in range(count)])

    def begin_batch(self) -> StepBatch:
        """The step's batch, beginning with the groups that the last step left over."""
        dynamic = self.objective.dynamic_sampling and self._recorded is None
        rounds = self.config.algorithm.max_resamples if dynamic else 1
        batch = StepBatch(self.config.prompts_per_step, dynamic, rounds, self.objective)
        batch.carry_over(self.state.pending)
        return batch

    @property
    def wants_batch(self) -> bool:
        """Whether another batch is to be rolled out before the next one is learned from.

        So it is at the end of a run too, where nothing will learn from it yet: a run that is extended is then the run
        that was planned longer.
        """
        ahead = 0 if self._recorded is not None else self.config.rollouts_ahead
        return len(self.state.queue) <= ahead

    def enqueue(self, batch: StepBatch) -> None:
        """A scored batch waits for its turn; what it leaves over begins the next one."""
        self.state.queue.append(batch)
        self.state.pending = batch.surplus

    def dequeue(self) -> StepBatch:
        """The oldest batch that waits, and past groups to learn from again."""
        batch = self.state.queue.pop(0)
        batch.replayed = self.parts.replay.draw(self.state.step)
        return batch

    def roll_out(self, count: int) -> list[Group]:
        """Verb 2: one group of completions for each of the next `count` prompts, which are scored as they come."""
        if self._recorded is not None:
            return next(self._recorded, [])
        first = self.state.cursor
        ids = list(range(first, first + count))
        examples = [self.parts.task.train.at(cursor) for cursor in ids]
        scoring = self._scoring = self.parts.scorer.begin(examples, self.parts.sampling.n)
        with self._timed("rollout"), self._peaks.of("rollout"), self._broken_weights_end_the_run():
            prompts = [e.prompt for e in examples]
            groups = self.parts.engine.generate(prompts, self.parts.sampling, ids, on_group=scoring.add)
        self._count("rollout/preemptions", self.parts.engine.stats.preemptions)
        self._metrics |= self.parts.engine.cache_metrics()
        self._count("rollout/tokens", sum(len(c.token_ids) for group in groups for c in group))
        self.state.cursor += count
        return [[_sample(completion, self.state.step) for completion in group] for group in groups]

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """Verb 3: the groups of the last rollout with rewards."""
        if self._recorded is not None:
            return list(groups)
        assert self._scoring is not None
        samples = [sample for group in groups for sample in group]
        with self._timed("score"):
            rewards = self._scoring.collect()
        self._count("time/score_overlapped", self._scoring.overlapped_s)
        for reward in rewards:
            if reward.error is not None:
                self.display.note(f"unscored: {reward.error}")
        distances: Sequence[tuple[float, ...] | None] = [None] * len(samples)
        if self.objective.kl_in_reward:
            with self._timed("score"), self._broken_weights_end_the_run():
                distances = self.parts.learner.reference_kl(samples)
        scored = iter(
            replace(s, reward=r.total, rewards=r.by_function, reference_kl=kl)
            for s, r, kl in zip(samples, rewards, distances)
        )
        return [[next(scored) for _ in group] for group in groups]

    def learn(self, samples: Sequence[Sample], advantages: Sequence[Advantage]) -> Learned:
        """Verb 5 (4, assigning credit, is a pure function of `rl`): optimizer steps."""
        self.parts.sleep()
        whole, self._whole = self._whole, None
        self._learner_totals = LearnerTotals(self.model)
        due = recorded(self.state.step + 1, self.config.run.quantization_every)
        with self._timed("learn"), self._peaks.of("learn"), self._learner_totals.watching(due):
            try:
                learned = self.parts.learner.learn(samples, advantages, self.state.step)
            except Disagreement as found:
                self._whole = whole  # the weights are still those of the last step
                replayed = self._recorded is not None
                raise failure(found, self.parts.learner, self.state.step + 1, self.run.directory, replayed) from None
        if (line := warning_of(learned.metrics, self.parts.learner, self.state.step + 1)) is not None:
            self.display.note(line)
        self.parts.calibrator.learned_from([(*s.prompt_ids, *s.completion_ids) for s in samples])
        tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
        nonzero = sum(advantage != 0 if isinstance(advantage, float) else any(advantage) for advantage in advantages)
        self._metrics["advantage/nonzero_fraction"] = nonzero / len(advantages) if advantages else math.nan
        self._metrics["throughput/learn_tokens_per_s"] = tokens / max(self._metrics["time/learn"], 1e-9)
        warning = small_step(self.objective.correction, learned.metrics)
        if warning is not None and not self._warned:
            self._warned = True
            self.display.note(f"step {self.state.step + 1}: {warning}")
        return learned

    def record(self, batch: StepBatch, learned: Learned) -> None:
        """Verb 6: metrics, completions, and, when they are due, an evaluation and a checkpoint."""
        state, config = self.state, self.config
        staleness = [state.step - s.rollout_step for g in (*batch.groups, *batch.replayed) for s in g]
        state.step += 1
        self.parts.replay.add(batch.groups)
        if "time/rollout" in self._metrics:
            speed = self._metrics["rollout/tokens"] / max(self._metrics["time/rollout"], 1e-9)
            self._metrics["throughput/rollout_tokens_per_s"] = speed
        measured = {
            **batch_metrics(batch),
            **staleness_metrics(staleness, len(batch.replayed), len(self.parts.replay.groups)),
            **learned.metrics,
            **self._learner_totals.metrics(),
            **self._metrics,
            "prompts/consumed": float(state.cursor),
            "weights_version": float(self.model.weights_version),
            "time/step": time.perf_counter() - self._began,
            **self.parts.memory_metrics(),
            **self._peaks.metrics(),
            "memory/peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        self.run.write_completions(rows_of(state.step, batch.groups, learned, self.parts))
        if self._weights.due(state.step, config.run.quantization_every):
            self.run.write_quantization(state.step, self._weights.by_tensor() | self._learner_totals.by_tensor())
        values = self._finish_step(measured)
        self.display.step(values, (self._shown(sample) for group in batch.groups for sample in group))
        every = config.run.checkpoint_every
        if state.step == config.steps or (every and state.step % every == 0):
            self._save()
        for callback in self._callbacks:
            callback(state.step, dict(values))
        self._stop_if_bad()

    def _shown(self, sample: Sample) -> Shown:
        return Shown(sample.reward, self.model.tokenizer.decode(sample.prompt_ids), sample.completion)

    def finish(self) -> None:
        """Save what is not saved, write the report, and say how to go on."""
        if self.saved_step != self.state.step:
            self._save()
        if self.config.run.report:
            path = write_report([self.run.directory], self.run.directory / runs.REPORT)
            self.display.note(f"report: {path}")
        if (verdict := self.display.history.standstill.verdict) is not None:
            self.display.note(verdict)
        if (line := self.best.line(self.state.step)) is not None:
            self.display.note(line)
        if self.interruption.signal is not None:
            again = f"isobit train --resume {self.run.directory}"
            self.display.note(f"stopped after step {self.state.step}; go on with: {again}")

    def _finish_step(self, measured: dict[str, float]) -> dict[str, float]:
        """Evaluate, if that is due, and write the metrics; a reward function that fails meanwhile leaves a step that
        can be saved, but for its row."""
        self.state.unrecorded = measured
        self._whole = self._snapshot()
        values = self._evaluate_and_write(self.state.step, measured, self.state.step == self.config.steps)
        self.state.unrecorded = None
        self._whole = self._snapshot()
        return values

    def _evaluate_and_write(
        self, step: int, measured: dict[str, float] | None = None, last: bool = False
    ) -> dict[str, float]:
        values = {"step": float(step), **(measured or {})}
        held_out = self.parts.held_out
        if held_out is not None and (step % self.config.evaluation.every == 0 or last):
            version = self.model.weights_version
            self._refresh()
            self.display.phase("evaluate")
            with self._broken_weights_end_the_run():
                found, line = held_out.evaluate()
            self.model.transformer.count_from(version)  # the next sync is of the same weights
            values |= found
            self.display.note(f"step {step}: {line}")
            self.best.consider(step, found)
        if len(values) > 1:
            self.run.write_metrics(values)
            self.trackers.poll()
        return values

    def _snapshot(self) -> Snapshot:
        return Snapshot.take(self.state, self.parts, self.run.offsets(), self.best.to_json())

    def _save(self, whole: Snapshot | None = None) -> None:
        self.display.phase("save")
        whole = whole or self._snapshot()
        keep_last = self.config.run.keep_last
        save_checkpoint(self.run.checkpoints, self.parts, whole.to_json(), whole.scales, keep_last)
        self.best.settle()
        self.saved_step = whole.state.step

    def _save_whole(self, whole: Snapshot, error: IsobitError) -> None:
        """The error ends the run: save its last whole step, and raise RunFailed that says how to go on."""
        step = whole.state.step
        if step != self.saved_step:
            with suppress(RunFailed):  # what ends the run is the first error, of a full disk also this one
                self._save(whole)
        if self.saved_step is None or "--resume" in str(error):
            return
        kept = f"step {self.saved_step} is saved; go on with: isobit train --resume {self.run.directory}"
        raise RunFailed(f"{error}; {kept}") from None

    def _stop_if_bad(self) -> None:
        bad = self.parts.learner.state.bad_steps_in_a_row
        if bad >= self.config.optimizer.max_bad_steps:
            self._fail(f"{bad} optimizer steps in a row had a loss or gradient that is not finite")

    @contextmanager
    def _broken_weights_end_the_run(self) -> Iterator[None]:
        """The learner skips a step that is not finite; weights that a finite step broke are the end."""
        try:
            yield
        except NonFiniteError as error:
            self._fail(f"the run diverged: {error}")

    def _fail(self, reason: str) -> NoReturn:
        self._whole = None
        saved = checkpoints.all_checkpoints(self.run.checkpoints)
        last = saved[-1] if saved else "missing"
        raise RunFailed(f"step {self.state.step}: {reason}; the last good checkpoint is {last}") from None

    def _count(self, name: str, value: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + value

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self.display.phase(name)
        yield
        self._count(f"time/{name}", time.perf_counter() - began)


def _sample(completion: Completion, step: int) -> Sample:
    return Sample(
        prompt_index=completion.prompt_id,
        sample_index=completion.sample_index,
        prompt_ids=tuple(completion.prompt_token_ids),
        completion_ids=tuple(completion.token_ids),
        rollout_logprobs=tuple(completion.logprobs),
        completion=completion.text,
        truncated=completion.finish_reason == "length",
        weights_version=completion.weights_version,
        routes=completion.routes,
        rollout_step=step,
    )
