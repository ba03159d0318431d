"""All of the environments that are wrong, by the command; two of them quickly, and one that is right
as the control."""

from pathlib import Path

import pytest

from tests.environments.wrong.__main__ import main, outcome, prepare
from tests.environments.wrong.cases import CASES, Case


@pytest.mark.slow
def test_each_stops_or_is_an_unscored_episode_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["wrong"])
    assert main() == 0, capsys.readouterr().out
    assert len(CASES) >= 100


def test_the_program_sees_what_is_silent_and_what_says_another_thing(tmp_path: Path) -> None:
    prepare(tmp_path)
    (text,) = [case for case in CASES if case.name == "reset returns int"]
    assert outcome(text, tmp_path)[0] == ""
    assert outcome(Case("right", "reset", "return ' Go'", "", 1), tmp_path)[0] == (
        "ended with 0, expected 1"
    )
    assert outcome(Case("right", "reset", "return ' Go'", "", 0), tmp_path)[0] == "0 lines"
    other = Case("another", "reset", "return 3", "returned str", 2)
    assert outcome(other, tmp_path)[0] == "does not say 'returned str'"
