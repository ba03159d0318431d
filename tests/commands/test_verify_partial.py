"""`isobit verify` of completions that went on across weight updates: each segment is drawn again
whose checkpoint is there, and what was changed is found."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit import load_config, train
from isobit.errors import RunFailed
from isobit.run import completions
from isobit.run.certificate import CERTIFICATE
from isobit.run.completions import COMPLETIONS
from isobit.training.commands.verify import verify_command

from ..runs import write_config
from ..training.test_partial import PARTIAL
from .test_verify import _rewritten, _said, _without_certificate

Row = dict[str, Any]


def _trained(folder: Path, model: Path, *overrides: str) -> Path:
    config = load_config(write_config(folder, model, **PARTIAL), overrides)
    assert train(config).exit_code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    return _trained(tmp_path_factory.mktemp("partial"), base_model)


@pytest.fixture
def run(tmp_path: Path, finished: Path) -> Path:
    """A copy, to be tampered with."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def _rows(run: Path) -> list[Row]:
    return list(completions.read(run / COMPLETIONS))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
def test_every_segment_is_drawn_again(
    tmp_path: Path,
    finished: Path,
    base_model: Path,
    ahead: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also of batches that waited until they were learned from."""
    run = _trained(tmp_path, base_model, "rollouts_ahead=1") if ahead else finished
    rows = _rows(run)
    tokens = sum(len(row["completion_ids"]) for row in rows)
    segments = sum(len(row.get("segments", [1])) for row in rows)
    assert any(len(row.get("segments", [])) > 2 for row in rows)
    *steps, held, unchecked, last = _said(run, capsys)
    assert all(line.endswith("every bit of its log-probability") for line in steps)
    assert held.startswith(f"certificate: {len(rows)} completions")
    assert unchecked.startswith(f"0 of {tokens:,} tokens were drawn by weights that no checkpoint")
    assert last == (
        f"{run}: {segments} of {segments} segments of completions were drawn again, and 0 of their "
        f"{tokens:,} tokens differ in any bit: these weights sampled what is recorded"
    )


def test_it_says_what_it_cannot_check(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the checkpoints of steps 1 and 2."""
    rows = _rows(run)
    gone = 0
    for row in rows:
        whole = [[0, len(row["completion_ids"]), 0, row["rollout_step"]]]
        drawn = row.get("segments", whole)
        gone += sum(stop - start for start, stop, _, step in drawn if step in (1, 2))
    for step in (1, 2):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    tokens = sum(len(row["completion_ids"]) for row in rows)
    *_, unchecked, last = _said(run, capsys)
    assert gone > 0
    assert unchecked.startswith(f"{gone:,} of {tokens:,} tokens were drawn by weights that no")
    assert f"and 0 of their {tokens - gone:,} tokens differ" in last


def _next_bit(row: Row) -> None:
    row["rollout_logprobs"][0] *= 1 + 2**-23  # of the oldest segment


def _later(row: Row) -> None:
    """As if the older weights had drawn four tokens more."""
    row["segments"][0][1] += 4
    row["segments"][1][0] += 4


def _uneven(row: Row) -> None:
    row["segments"][0][1] += 1
    row["segments"][1][0] += 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_next_bit, r": 1 differ; first: prompt \d+, sample \d, token 0: recorded id "),
        (_later, r"differ; first: prompt \d+, sample \d, "),
        (_uneven, r"its segment of step \d has \d+ tokens, and a round has 4 \(partial"),
    ],
)
def test_what_was_changed_is_found(run: Path, change: Callable[[Row], None], said: str) -> None:
    """Without the chain, which finds everything."""
    chosen = next(
        (row["prompt_index"], row["sample_index"])
        for row in _rows(run)
        if "segments" in row and row["segments"][1][1] - row["segments"][1][0] > 4
    )

    def changed(row: Row) -> Row:
        if (row["prompt_index"], row["sample_index"]) == chosen:
            change(row)
        return row

    _rewritten(run, changed)
    _without_certificate(run)
    with pytest.raises(RunFailed, match=said):
        verify_command(run, None)
    assert not (run / CERTIFICATE).exists()
