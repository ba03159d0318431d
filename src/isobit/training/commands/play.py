"""`isobit play`: a row of a run's data as one completion or episode, token by token as the model is
shown it, and what it earns. Left out: learning from it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

from isobit.config import Config
from isobit.engine.episodes import Episodes
from isobit.engine.types import Completion
from isobit.errors import IsobitError
from isobit.model import Tokenizer
from isobit.training.parts.assembly import open_parts
from isobit.training.parts.sampled import SampledParts
from isobit.training.saving.snapshot import State

Say = Callable[[str], None]


def play(config: Config, row: int, say: Say) -> None:
    """Sample a completion of one training row, counted from 0 in the order in which the run takes
    them, with the run's own parts, as its first step would, score it, and describe it to `say`,
    block by block. Nothing is written. Raises IsobitError for a row that is not there and for
    anything that a run would not take."""
    parts = open_parts(config, quiet=True, before_weights=lambda *_: None)
    with parts.processes:
        say(f"{parts.model.config.family}, {config.precision}; rewards: {_rewards(parts)}")
        _play(parts, row, say)


def _play(parts: SampledParts, row: int, say: Say) -> None:
    if not 0 <= row < len(parts.train):
        raise IsobitError(f"--row {row}: the training data has rows 0 to {len(parts.train) - 1}")
    example = parts.train.at(row)
    sampling = replace(parts.sampling, n=1)
    scoring = parts.scorer.begin(
        [example], 1, State().progress(parts.config.steps, len(parts.train))
    )
    if parts.trained.calibrator.active:  # as before a first step
        count = parts.model.precision.calibration.prompts
        parts.trained.calibrator.calibrate([parts.train.at(i).prompt for i in range(count)])
    episodes = Episodes(parts.engine, parts.dialogue)
    ((completion,),) = episodes.generate([example], sampling, [row], on_group=scoring.add)
    for text in _blocks(completion, parts.model.tokenizer):
        say(text)
    (reward,) = scoring.collect()
    for line in (*scoring.notes, reward.error):
        if line:
            say(line)
    episode = completion.episode
    turns = "" if episode is None else f"; turns: {episode.turns}"
    ended = (
        "" if episode is None else f", ended by {'the environment' if episode.done else 'a limit'}"
    )
    by_function = ", ".join(
        f"{name} {'unscored' if value is None else f'{value:g}'}"
        for name, value in reward.by_function.items()
    )
    total = "unscored" if reward.total is None else f"{reward.total:g}"
    say(
        f"{example.place}: reward {total} ({by_function}){turns}; {sum(completion.sampled)} of "
        f"{len(completion.token_ids)} tokens trained; finish: {completion.finish_reason}{ended}"
    )


def _blocks(completion: Completion, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the prompt, then each run of tokens that were sampled, which are trained, or given."""

    def block(heading: str, ids: list[int]) -> str:
        return f"[{heading}, {len(ids)} tokens]\n{tokenizer.decode(ids, special=True)}"

    yield block("shown", completion.prompt_token_ids)
    indices = range(len(completion.token_ids))
    for (sampled, _), run in groupby(
        indices, lambda t: (completion.sampled[t], sum(fork <= t for fork in completion.forks))
    ):
        ids = [completion.token_ids[t] for t in run]
        yield block("sampled, trained" if sampled else "given", ids)
    episode = completion.episode
    for name, error in () if episode is None else episode.uses:
        yield f"tool {name}: {error or 'ok'}"


def _rewards(parts: SampledParts) -> str:
    return ", ".join(f"{name} x {weight:g}" for name, weight in parts.scorer.weights) or "none"
