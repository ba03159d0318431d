"""What a run that samples says of a step: rewards, lengths and staleness, its completions, and those
for the screen."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from isobit.monitor.screen import Shown
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.replay import ReplayBuffer
from isobit.training.learning import Lesson
from isobit.training.measuring.statistics import batch_metrics, partial_metrics, staleness_metrics
from isobit.training.recording.rows import CompletionRows
from isobit.training.saving.snapshot import State


@dataclass(frozen=True, eq=False)
class LearnedRollouts:
    """The metrics and rows of a step of RL that is counted already: `state.step` is its number."""

    completions: CompletionRows
    state: State
    replay: ReplayBuffer

    def metrics(self, batch: StepBatch, lesson: Lesson) -> dict[str, float]:
        """Return the metrics of the batch, its samples' age in steps, and the lesson."""
        learned_step = self.state.step - 1
        staleness = [learned_step - s.oldest_step for group in batch.learned_from for s in group]
        staled = staleness_metrics(staleness, len(batch.replayed), len(self.replay.groups))
        partial = partial_metrics([s for group in batch.learned_from for s in group])
        return batch_metrics(batch) | staled | partial | dict(lesson.metrics)

    def rows(self, step: int, batch: StepBatch, lesson: Lesson) -> Iterator[dict[str, Any]]:
        """Yield a row for each completion that was sampled for the step."""
        return self.completions.of(step, batch.groups, lesson.compared)

    def shown(self, batch: StepBatch) -> Iterator[Shown]:
        """Return each completion of the batch with its prompt, to be shown on the screen."""
        decode = self.completions.tokenizer.decode
        for group in batch.groups:
            for sample in group:
                yield Shown(sample.reward, decode(sample.prompt_ids), sample.completion)
