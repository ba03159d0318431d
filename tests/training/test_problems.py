"""What is said of completions that could not be scored, and when that ends a run."""

from collections.abc import Sequence

import pytest

from isobit.data.episodes import EpisodeRecord
from isobit.distributed import ALONE
from isobit.errors import RunFailed
from isobit.rl import Sample
from isobit.tasks.rewards.pool import Reward
from isobit.training.rollouts.problems import Problems

PROBLEM = "step: KeyError: 'board' (game.py, line 6)"


def sample(reward: float | None, episode: EpisodeRecord | None = None) -> Sample:
    return Sample(
        prompt_index=0,
        sample_index=0,
        prompt_ids=(1,),
        completion_ids=(2,),
        rollout_logprobs=(0.0,),
        completion="a",
        truncated=False,
        weights_version=0,
        reward=reward,
        rewards={"Game": reward},
        episode=episode,
    )


def said(
    problems: Problems,
    step: int,
    errors: Sequence[str | None],
    *,
    episodes: Sequence[EpisodeRecord | None] | None = None,
    scored: bool = True,
) -> list[str]:
    rewards = [Reward(1.0 if error is None else None, {}, error) for error in errors]
    groups = [
        [sample(each.total, episode)]
        for each, episode in zip(rewards, episodes or [None] * len(rewards), strict=True)
    ]
    if scored:
        groups.append([sample(1.0)])
    return list(problems.of_step(step, [], rewards, groups))


def test_equal_problems_are_counted_in_a_step_and_over_steps() -> None:
    """Said again when there are twice as many; the control, another one, is said at once."""
    problems = Problems(ALONE, True, ())
    assert said(problems, 1, [PROBLEM] * 32) == [f"unscored: {PROBLEM} ... 31 more like it"]
    assert said(problems, 2, [PROBLEM] * 16) == []
    assert said(problems, 3, [PROBLEM] * 16) == [
        f"unscored: {PROBLEM} ... 15 more like it ... 64 so far"
    ]
    assert said(problems, 4, [PROBLEM, "another"]) == ["unscored: another"]


def test_samples_of_a_reward_function_are_alike_whatever_they_are() -> None:
    errors = [
        f"reward function r.py:f, sample {i} (prompt {text!r}): ValueError: no (r.py, line 3)"
        for i, text in enumerate(("a", "it's", "b: c"))
    ]
    (line,) = said(Problems(ALONE, True, ()), 1, errors)
    assert line == f"unscored: {errors[0]} ... 2 more like it"


def test_many_reasons_are_bounded() -> None:
    errors = [f"reason {i}" for i in range(50)]
    lines = said(Problems(ALONE, True, ()), 1, errors)
    assert len(lines) == 9
    assert lines[-1] == "unscored: 42 more, for 42 other reasons"


@pytest.mark.parametrize(
    ("errors", "says"),
    [
        ([PROBLEM] * 4, f"could be scored: {PROBLEM}; rewards.on_error: skip would go on"),
        ([PROBLEM, PROBLEM, "b"], f"could be scored: {PROBLEM} (other reasons are above); rewards"),
        ([None], None),
    ],
)
def test_a_step_without_a_score_ends_the_run_unless_it_may_not(
    errors: list[str | None], says: str | None
) -> None:
    if says is None:
        assert said(Problems(ALONE, True, ()), 3, errors, scored=False) == []
        return
    with pytest.raises(RunFailed) as caught:
        said(Problems(ALONE, True, ()), 3, errors, scored=False)
    assert str(caught.value).startswith(f"none of the {len(errors)} completions of step 3")
    assert says in str(caught.value)
    assert said(Problems(ALONE, False, ()), 3, errors, scored=False)
    assert said(Problems(ALONE, True, ()), 3, errors, scored=True)


def test_episodes_whose_reward_is_none_end_it_and_functions_that_do_not_apply_do_not() -> None:
    """A function that says None does not apply: a run may be of such steps (`no_progress`)."""
    episode = EpisodeRecord(1, ())
    groups = [[sample(None, episode)]]
    with pytest.raises(RunFailed, match=r"no reward was given \(Game said None\)"):
        list(Problems(ALONE, True, ()).of_step(1, [], [Reward(None, {})], groups))
    assert not list(Problems(ALONE, False, ()).of_step(1, [], [Reward(None, {})], groups))
    plain = [[sample(None)]]
    assert not list(Problems(ALONE, True, ()).of_step(1, [], [Reward(None, {})], plain))


def test_a_variable_of_an_environment_is_named() -> None:
    error = "step: KeyError: 'NO_SUCH_KEY' of os.environ (game.py, line 6)"
    (line,) = said(Problems(ALONE, True, ()), 1, [error])
    assert line.endswith("NO_SUCH_KEY is not set: set it, and name it in environment.variables")


def test_a_problem_of_an_episode_that_is_scored_is_said_too() -> None:
    """A step that failed after it had given a reward; the control, a tool's problem, is told to the
    model."""
    failed = EpisodeRecord(2, (), problem=PROBLEM)
    lines = said(Problems(ALONE, True, ()), 1, [None] * 2, episodes=[failed] * 2)
    assert lines == [f"scored all the same: {PROBLEM} ... 1 more like it"]
    told = EpisodeRecord(2, (), problem="tool add: ValueError: over (game.py, line 3)")
    assert said(Problems(ALONE, True, ()), 1, [None], episodes=[told]) == []


def used(*errors: str | None, text: str = "fine", name: str = "add") -> EpisodeRecord:
    messages = ({"role": "assistant", "content": "<object at 0x7f0000000000>"},)
    answers = tuple({"role": "tool", "name": name, "content": text} for _ in errors)
    return EpisodeRecord(1, messages + answers, tuple((name, error) for error in errors))


def test_a_tool_that_always_fails_is_said_once() -> None:
    """Controls: one that came back once, one of few calls, and calls of tools that there are not."""
    problems = Problems(ALONE, True, ())
    failing = [used("no", "no"), used("no", "no")]
    assert said(problems, 1, [None] * 2, episodes=failing) == [
        "tool add failed in each of its 4 calls of step 1, and the model was told: no"
    ]
    assert said(problems, 2, [None] * 2, episodes=failing) == []
    for others in (
        [used("no", "no", "no", None)],
        [used("no", "no", "no")],
        [used(*["no"] * 9, name="unknown")],
    ):
        assert said(Problems(ALONE, True, ()), 1, [None], episodes=others) == []


def test_an_address_of_memory_is_said_once_for_each_tool() -> None:
    """Not of what the model wrote, and not of a number that is not an address."""
    problems = Problems(ALONE, True, ())
    text = "[<games.Board object at 0x7f3a5c0d1e50>]"
    lines = said(problems, 1, [None] * 2, episodes=[used(None, None, text=text)] * 2)
    assert lines == [
        "tool add says an address of memory ([<games.Board object at 0x...>]), which is another in "
        "each run: return text, or give the object a __str__"
    ]
    assert said(problems, 2, [None], episodes=[used(None, text=text)]) == []
    other = said(problems, 3, [None], episodes=[used(None, text=text, name="other")])
    assert other[0].startswith("tool other says an address of memory")
    assert said(Problems(ALONE, True, ()), 1, [None], episodes=[used(None, text="0x7f3a")]) == []
