"""Which prompts a curriculum takes: by what was solved, with a floor; and that a run goes on with it,
bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.data.curriculum import Curriculum, CurriculumConfig
from isobit.data.dataset import Dataset, Example
from isobit.errors import IsobitError
from isobit.run import checkpoints
from isobit.training.train import resume, train
from tests import warm
from tests.distributed.sessions import bits, resumed
from tests.distributed.threads import run
from tests.runs import fingerprint, killed_after, write_config

SIZE = 50


def curriculum(solved: dict[int, float], **config: Any) -> Curriculum:
    data = Dataset([Example(i, f"prompt {i}", {}) for i in range(SIZE)], seed=3)
    return Curriculum(CurriculumConfig(**config), data, solved)


def taken(solved: dict[int, float], epochs: int, **config: Any) -> list[int]:
    """How often each example is taken."""
    found, often = curriculum(solved, **config), [0] * SIZE
    cursor = 0
    while cursor < epochs * SIZE:
        (position,), cursor = found.take(cursor, 1)
        if position < epochs * SIZE:
            often[found._train.at(position).index] += 1
    return often


def test_always_and_never_solved_are_skipped_but_for_the_floor() -> None:
    """Over 400 epochs, to four deviations; what was not sampled yet is taken in each."""
    solved = {0: 0.0, 1: 1.0, 2: 0.5, 3: 0.25}
    often = taken(solved, 400, mode="skip", floor=0.2)
    assert all(abs(often[i] - 80) < 32 for i in (0, 1))
    assert often[2] == often[3] == often[4] == 400
    weighted = taken(solved, 400, mode="weighted", floor=0.2)
    assert all(abs(weighted[i] - 80) < 32 for i in (0, 1))
    assert weighted[2] == weighted[4] == 400
    assert abs(weighted[3] - 300) < 35
    assert taken(solved, 3, mode="none") == [3] * SIZE, "the control"
    assert taken(solved, 3, mode="skip", floor=1.0) == [3] * SIZE


def test_what_is_taken_next_is_a_function_of_cursor_and_fractions() -> None:
    solved = {i: float(i % 2) for i in range(SIZE)}
    whole, after = curriculum(solved, mode="skip").take(0, 30)
    first, middle = curriculum(solved, mode="skip").take(0, 11)
    rest, end = curriculum(solved, mode="skip").take(middle, 19)
    assert (whole, after) == ([*first, *rest], end)
    assert after > 30
    other, _ = curriculum({}, mode="skip").take(0, 30)
    assert other == list(range(30)), "the control: nothing was seen"


def test_fractions_are_those_of_scored_completions() -> None:
    solved: dict[int, float] = {}
    found = curriculum(solved, mode="skip", solved_at=0.5)
    index = found._train.at(7).index
    found.see(7, [0.5, 0.4, None, 1.0])
    assert solved == {index: 2 / 3}
    found.see(7, [None, None])
    assert solved == {index: 2 / 3}
    found.see(7 + SIZE, [0.0])
    assert found._train.at(7 + SIZE).index in solved


CHOSEN = {
    "task": {
        "name": "arithmetic",
        "held_out_size": 2,
        "options": {"digits": 1, "train_size": 8},
    },
    "curriculum": {"mode": "skip", "floor": 0.3, "solved_at": 0.3},
    "steps": 6,
}


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, base_model: Path) -> None:
    """With rollouts ahead too. The controls: it passed prompts over, and without the fractions of
    its checkpoint it is another."""
    for name in ("whole", "parts", "lost"):
        (tmp_path / name).mkdir()
    more = {**CHOSEN, "rollouts_ahead": 1}
    paths = {name: write_config(tmp_path / name, base_model, **more) for name in ("whole", "parts")}
    whole = train(load_config(paths["whole"]), quiet=True)
    skipped = [row["prompts/skipped"] for row in whole.metrics if row["step"]]
    assert sum(skipped) > 0
    assert skipped[0] == 0
    assert whole.metrics[-1]["prompts/consumed"] == 7 * 4 + sum(skipped)
    train(load_config(paths["parts"], ["steps=4"]), quiet=True)
    newest = checkpoints.all_checkpoints(tmp_path / "parts" / "run" / "checkpoints")[-1]
    assert '"solved"' in (newest / "trainer" / "state.json").read_text()
    resume(tmp_path / "parts" / "run", ["steps=6"], quiet=True)
    assert fingerprint(tmp_path / "parts" / "run") == fingerprint(whole.run_dir)
    plain = write_config(tmp_path / "lost", base_model, **{**more, "curriculum": {}})
    control = train(load_config(plain), quiet=True)
    name = "model.safetensors"
    assert fingerprint(control.run_dir)[name] != fingerprint(whole.run_dir)[name]
    assert "prompts/skipped" not in control.metrics[-1]


@pytest.mark.slow
def test_a_killed_run_goes_on_at_another_number_of_ranks(tmp_path: Path, base_model: Path) -> None:
    """SIGKILL after four rows of metrics; then two ranks (others: `tests/distributed/test_runs.py`)."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    task = {**CHOSEN["task"], "held_out_size": 0}
    paths = {
        name: write_config(tmp_path / name, base_model, **{**CHOSEN, "task": task})
        for name in ("whole", "killed")
    }
    whole = train(load_config(paths["whole"]), quiet=True)
    assert sum(row["prompts/skipped"] for row in whole.metrics[-2:]) > 0
    directory = tmp_path / "killed" / "run"
    process = warm.start(["isobit", "train", str(paths["killed"]), "--quiet"], tmp_path)
    killed_after(process, directory, 4)
    run(2, lambda ranks: resumed(directory, [], ranks))
    assert bits(directory) == bits(Path(whole.run_dir))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["fleet.engines=1"], "curriculum: engines of a fleet sample beside the learner"),
        (["curriculum.floor=0"], "curriculum.floor: expected above 0"),
        (["epochs=1"], "epochs: under curriculum a step takes as many prompts as it needs"),
        (
            [
                "algorithm.advantage=distillation",
                "algorithm.kl_coefficient=1",
                "algorithm.kl_in_reward=true",
                "reference.path=teacher",
            ],
            "curriculum: a distillation has no rewards",
        ),
    ],
)
def test_where_it_makes_no_sense_it_is_refused(
    changes: list[str], message: str, tmp_path: Path, base_model: Path
) -> None:
    path = write_config(tmp_path, base_model, **CHOSEN)
    with pytest.raises(IsobitError, match=message):
        load_config(path, changes)
