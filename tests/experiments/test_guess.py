"""The experiment on a game with a sparse reward: that it measures runs of the config, the chances
that stand beside them, and its page, whose numbers are those of the results."""

import json
import random
import re
from pathlib import Path

import pytest

from benchmarks.experiments.guess import ARMS, Player, draw, game, measure, players, table
from isobit.tasks.guess import left_after

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/experiments/guess.json"
PAGE = ROOT / "docs/experiments/guess.md"


@pytest.mark.slow
def test_all_runs_are_measured(tmp_path: Path) -> None:
    """Of two steps each; done again, they are read."""
    changes = ("steps=2", "evaluation.every=1", "evaluation.samples=8", "prompts_per_step=2")
    found = measure(tmp_path, *changes)
    for arm, seeds in ARMS.items():
        assert set(found["runs"][arm]) == set(map(str, seeds))
        for one in found["runs"][arm].values():
            assert [step for step, _ in one["accuracy/held_out"]] == [0, 1, 2]
            assert [value for _, value in one["mismatch/differing_tokens"]] == [0, 0]
            assert one["seconds"]["run"] > 0
    assert measure(tmp_path, *changes) == found
    draw(found, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("careless", [0.0, 0.7])
def test_a_players_chances_are_those_of_games(careless: float) -> None:
    """Of 20,000 that are played; the control is another player's."""
    numbers, guesses, draws, won = 15, 4, random.Random(3), 0
    for _ in range(20_000):
        secret, low, high = draws.randint(1, numbers), 1, numbers
        for _ in range(guesses):
            whole = draws.random() < careless
            guess = draws.randint(1, numbers) if whole else draws.randint(low, high)
            if guess == secret:
                won += 1
                break
            low, high = left_after(low, high, guess, secret)
    assert Player(numbers, guesses, careless).wins == pytest.approx(won / 20_000, abs=0.012)
    assert Player(numbers, guesses, 0.35).wins != pytest.approx(won / 20_000, abs=0.012)


def test_what_guesses_explain_is_the_variance_of_their_chances() -> None:
    """Of one guess of two numbers it is nothing, whichever is guessed; of two, a careless player's
    second guess is right or not."""
    assert Player(2, 1, 0.0).explained() == pytest.approx(0.0)
    heeding, careless = Player(3, 2, 0.0), Player(3, 2, 1.0)
    assert heeding.wins == pytest.approx(1 / 3 + (2 / 3) * (2 / 3 * 1 / 2 + 1 / 3 * 1))
    assert 0 < heeding.explained() < careless.explained() < 1


def test_the_page_has_the_table_of_the_results() -> None:
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text()


def test_the_game_is_learned_from_wins_alone() -> None:
    """With every seed, held out and while sampling, and no token differed. A run is of less than
    ten minutes of one thread, its base too."""
    found = json.loads(RESULTS.read_text())
    assert found["game"] == game()
    assert found["players"] == pytest.approx(players())
    assert len(found["runs"]["sparse"]) >= 2
    for one in found["runs"]["sparse"].values():
        wins = [value for _, value in one["accuracy/held_out"]]
        assert wins[0] < 0.2
        assert wins[-1] > 0.6
        sampled = [value for _, value in one["reward/mean"]]
        assert sum(sampled[:5]) / 5 < 0.3
        assert sum(sampled[-5:]) / 5 > 0.6
        assert sum(one["seconds"].values()) < 600
    for seeds in found["runs"].values():
        for one in seeds.values():
            assert {value for _, value in one["mismatch/differing_tokens"]} == {0.0}


def test_the_prose_has_the_numbers_of_the_results() -> None:
    """Each chance of a player that the text names is computed."""
    known = {f"{chance:.2f}" for chance in players().values()}
    known |= {f"{chance:.3f}" for chance in players().values()}
    prose = "\n".join(line for line in PAGE.read_text().splitlines() if line[:1] != "|")
    said = re.findall(r"\((0\.\d{2,3})\)", prose)
    assert len(said) >= 4
    assert set(said) <= known
