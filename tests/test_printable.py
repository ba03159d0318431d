"""What a model, a row or an exception wrote reaches no terminal as a command."""

import json
from pathlib import Path

import pytest

from isobit import cli
from isobit.engine.types import Completion
from isobit.errors import IsobitError, printable
from isobit.monitor.screen import Display
from isobit.training.commands import dry_run, generate
from tests.conftest import RunIsobit

HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m \r \u202e \x7f \ud800"


def test_escape_sequences_are_written_out_and_text_stays() -> None:
    shown = printable(HOSTILE)
    assert shown.startswith("\\x1b[2J\\x1b]0;owned\\x07 \\x9b31m \\r \\u202e")
    assert shown.isprintable()
    for text in ("line\n\ttab", "日本語　空白", "a\u00a0b", "👩\u200d👩\u200d👧", "naïve"):
        assert printable(text) == text


def test_errors_and_notes_are_shown_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise IsobitError(f"reward failed: {HOSTILE}")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    with Display(1) as display:
        display.note(HOSTILE)
    printed = capsys.readouterr().err
    assert printed.count("\\x1b[2J") == 2
    assert "\x1b" not in printed


def test_a_dry_run_shows_prompts_so(monkeypatch: pytest.MonkeyPatch, run_isobit: RunIsobit) -> None:
    monkeypatch.setattr(dry_run, "dry_run", lambda config, say: say(f"first prompt: {HOSTILE}"))
    code, out, _ = run_isobit("train", "configs/quickstart.yaml", "--dry-run")
    assert code == 0
    assert printable(HOSTILE) in out


def test_json_of_completions_holds_no_control_character_and_the_same_text() -> None:
    text = HOSTILE.replace("\ud800", "")
    line = generate._line(text, Completion(0, 0, [], [], text, [], "stop", 0))
    assert line == printable(line)
    assert json.loads(line)["prompt"] == json.loads(line)["text"] == text


def test_a_broken_line_of_metrics_is_counted(tmp_path: Path) -> None:
    from isobit.monitor.screen.watch import GrowingRows

    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    growing = GrowingRows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in growing.rows()] == [1, 3]
    assert growing.lost == 1
