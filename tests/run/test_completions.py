"""completions.jsonl.gz: readable by any gzip, exact, cut by steps; and what `run.completions`
leaves out."""

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.monitor.report import write_report
from isobit.monitor.report.rollouts import read_rollouts
from isobit.monitor.screen.watch import Watched
from isobit.run.completions import (
    COMPLETIONS,
    SAME,
    CompletionTail,
    Member,
    lines,
    members,
    pack,
    parse,
    read,
)
from isobit.run.directory import Lock, read_jsonl
from isobit.training.recording.rows import LONGEST_COLUMN, SAMPLED, _compact, shortened
from isobit.training.train import replay, resume, train
from tests.runs import fingerprint, write_config

STEPS = [
    [{"step": 1, "text": "ü\r\u2028\n"}, {"step": 1, "text": "\ud800 half a pair"}],
    [],
    [{"step": 3, "text": ""}],
]


def test_any_gzip_reads_it_and_so_do_we(tmp_path: Path) -> None:
    path = tmp_path / COMPLETIONS
    path.write_bytes(b"".join(map(pack, STEPS)))
    wanted = [row for step in STEPS for row in step]
    with gzip.open(path, "rt", encoding="utf-8") as file:
        assert [json.loads(line) for line in file] == wanted
    assert list(read(path)) == wanted
    assert [list(map(parse, lines(path, member))) for member in members(path)] == [
        STEPS[0],
        STEPS[2],
    ]
    assert list(read(tmp_path / "nothing")) == []
    assert pack(STEPS[0]) == pack(iter(STEPS[0]))


def test_what_is_half_written_is_left_out_and_what_is_damaged_said(tmp_path: Path) -> None:
    path, parts = tmp_path / COMPLETIONS, [pack(STEPS[0]), pack(STEPS[2])]
    tail = CompletionTail(path)
    assert list(tail) == []
    for length in range(len(parts[1])):
        path.write_bytes(parts[0] + parts[1][:length])
        assert list(members(path)) == [Member(0, len(parts[0]))]
    assert list(tail) == STEPS[0]
    path.write_bytes(b"".join(parts))
    assert list(tail) == STEPS[2]
    assert list(tail) == []
    path.write_bytes(parts[0][:40] + bytes(10) + parts[0][50:])
    with pytest.raises(IsobitError, match=r"completions\.jsonl\.gz: damaged at byte 0"):
        list(read(path))
    path.write_bytes(gzip.compress(b"{}\n" * 99))
    with pytest.raises(IsobitError, match="not completions as a run records them, at byte 0"):
        list(read(path))


def test_a_page_says_where_completions_end_or_are_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line with the file and the place. The controls: a whole file is not spoken of, nor is
    what a run that still writes has not finished."""
    path, parts = tmp_path / COMPLETIONS, [pack(STEPS[0]), pack(STEPS[2])]
    whole = len(parts[0])
    damaged = parts[0][:40] + bytes(10) + parts[0][50:]
    for content, said in (
        (b"", ""),
        (parts[0] + parts[1], ""),
        (
            b"junk",
            f"{path}: cut off after byte 0: the last 4 bytes are no whole step, and left out",
        ),
        (parts[0][:-1], f"cut off after byte 0: the last {whole - 1} bytes are no whole step"),
        (parts[0] + parts[1][:30], f"cut off after byte {whole}: the last 30 bytes"),
        (damaged + parts[1], "1 row or step cannot be read and left out; the first: damaged"),
        (pack([{"step": "x"}]) + parts[1], "the first: row 1: step is 'x'"),
    ):
        path.write_bytes(content)
        read_rollouts(path)
        found = capsys.readouterr().err
        assert said in found, content
        assert found.count("\n") == bool(said)
    path.write_bytes(parts[0][:-1])
    lock = Lock(tmp_path)
    read_rollouts(path)
    lock.close()
    assert capsys.readouterr().err == ""
    path.write_bytes(b"{}\n" * 99)
    with pytest.raises(IsobitError, match="not completions as a run records them, at byte 0"):
        read_rollouts(path)


def test_log_probabilities_are_short_and_the_same_bits() -> None:
    """Every exponent, zeros of both signs, the smallest and the largest; the control takes one
    digit less."""
    generator = np.random.Generator(np.random.Philox(key=0))
    words = generator.integers(0, 1 << 32, 50_000, dtype=np.uint32)
    values = np.concatenate([words.view(np.float32), np.float32([0.0, -0.0, 1e-45, 3.4028235e38])])
    values = values[np.isfinite(values)]
    plain = values.astype(np.float64).tolist()
    row = {"step": 1, "rollout_logprobs": _compact(plain), "policy_logprobs": SAME}
    found = parse(json.dumps(row).encode())
    assert struct.pack(f"{len(plain)}d", *found["rollout_logprobs"]) == struct.pack(
        f"{len(plain)}d", *plain
    )
    assert found["policy_logprobs"] == found["rollout_logprobs"]
    shorter = parse(
        json.dumps({"step": 1, "rollout_logprobs": [float(f"{x:.8g}") for x in plain]}).encode()
    )
    assert shorter["rollout_logprobs"] != plain
    with pytest.raises(AssertionError, match="are float32"):
        _compact([0.1])


def recorded(run: Path) -> list[dict[str, Any]]:
    return list(read(run / COMPLETIONS))


@pytest.mark.parametrize(("precision", "same"), [("fp8", True), ("fp8-rollout", False)])
def test_a_row_says_where_it_came_from(
    tmp_path: Path, base_model: Path, precision: str, same: bool
) -> None:
    """The data's row and its columns, the prompt as the model read it, and that both sides computed
    the same bits."""
    rows = [
        {"prompt": f"{i}+{i}=", "answer": str(2 * i), "tests": "x" * 9000, "tags": ["a", None]}
        for i in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "file", "path": str(tmp_path / "rows.jsonl"), "held_out_size": 2, "options": {}}
    config = load_config(
        write_config(tmp_path, base_model, task=task, precision=precision), ["steps=2"]
    )
    run = train(config).run_dir
    tokenizer = Model.load(base_model).tokenizer
    found = recorded(run)
    assert len(found) == 2 * 4 * 4
    assert len({row["row"] for row in found}) > 3
    for row in found:
        source = rows[row["row"]]
        assert (row["prompt"], row["columns"]["answer"]) == (source["prompt"], source["answer"])
        assert row["columns"]["tags"] == ["a", None]
        assert row["columns"]["tests"] == f'"{"x" * (LONGEST_COLUMN - 1)} … (9,002 characters)'
        assert row["prompt_rendered"] == tokenizer.decode(row["prompt_ids"], special=True)
    with gzip.open(run / COMPLETIONS) as file:
        raw = [json.loads(line) for line in file]
    assert {row["policy_logprobs"] == SAME for row in raw} == {same}
    assert all((row["policy_logprobs"] == row["rollout_logprobs"]) == same for row in found)


def test_columns_are_plain_json() -> None:
    assert shortened({"a": [1.5, float("nan")], "b": Path("x")}) == {"a": [1.5, None], "b": "x"}


def test_a_chats_special_tokens_are_in_its_rendered_prompt(
    tmp_path: Path, base_model: Path
) -> None:
    row = recorded(train(load_config(write_config(tmp_path, base_model), ["steps=1"])).run_dir)[0]
    tokenizer = Model.load(base_model).tokenizer
    ids = [*tokenizer.encode("1+1="), *tokenizer.eos_ids]
    assert (
        tokenizer.decode(ids, special=True) != tokenizer.decode(ids) == "1+1="
    )  # what tells the two apart
    assert row["prompt_rendered"] == row["prompt"]  # this prompt has none


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "sample", "none"])
def test_what_is_left_out(tmp_path: Path, base_model: Path, kind: str) -> None:
    """The same weights; a sampled run keeps the report's figures, and neither can be repeated."""
    config = write_config(
        tmp_path, base_model, run={"completions": kind}, sampling={"group_size": 8}
    )
    run = train(load_config(config, ["steps=2"])).run_dir
    resume(run, ["steps=3", "run.report=true"])
    (tmp_path / "all").mkdir()
    all_config = write_config(tmp_path / "all", base_model, sampling={"group_size": 8})
    everything = train(load_config(all_config, ["steps=3"])).run_dir
    assert fingerprint(run)["model.safetensors"] == fingerprint(everything)["model.safetensors"]
    rows, whole = recorded(run), recorded(everything)
    if kind == "all":
        assert rows == whole
        assert fingerprint(run) == fingerprint(everything)
        return
    with pytest.raises(
        IsobitError, match=f"it recorded run.completions: {kind}, and only with all"
    ):
        replay(run, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    page = (run / "report.html").read_text()
    watched = Watched(run)
    watched.look()
    if kind == "none":
        assert rows == []
        assert "part-completions" not in page
        assert watched.history.best is None
        return
    assert len(rows) == len(whole)
    for step in (1, 2, 3):
        of_step = [row for row in rows if row["step"] == step]
        shown, possible = (
            [row for row in found if row["step"] == step] for found in (of_step, whole)
        )
        shown = [row for row in shown if "completion" in row]
        assert len(shown) == SAMPLED
        assert all(row in whole for row in shown)
        for pick in (min, max):
            assert pick(row["reward"] for row in shown) == pick(row["reward"] for row in possible)
    found, wanted = read_rollouts(run / COMPLETIONS), read_rollouts(everything / COMPLETIONS)
    assert (found.visits, found.count, found.solved_from) == (
        wanted.visits,
        wanted.count,
        wanted.solved_from,
    )
    assert found.reward_intervals() == wanted.reward_intervals()
    assert f"{3 * SAMPLED} of {len(whole)} completions, of 3 of 3 steps." in page
    assert watched.history.best is not None
    best = max(row["reward"] for row in whole if row["step"] == 3)
    assert watched.history.best.reward == best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "step"), [("none", "all", 1), ("all", "none", 3), ("sample", "all", 1)]
)
def test_a_run_that_changed_its_mind_is_not_repeated_in_part(
    tmp_path: Path, base_model: Path, first: str, second: str, step: int
) -> None:
    config = write_config(tmp_path, base_model, run={"completions": first})
    run = train(load_config(config, ["steps=2"])).run_dir
    resume(run, ["steps=4", f"run.completions={second}"])
    message = (
        f"recorded run.completions: {second}"
        if second != "all"
        else f"step {step} was recorded with"
    )
    with pytest.raises(IsobitError, match=message):
        replay(run, tmp_path / "again")


@pytest.mark.slow
def test_a_run_whose_last_steps_are_missing_is_not_repeated(
    tmp_path: Path, base_model: Path
) -> None:
    run = train(load_config(write_config(tmp_path, base_model))).run_dir
    path = run / COMPLETIONS
    places = list(members(path))
    assert len(places) == len(list(read_jsonl(run / "metrics.jsonl"))) == 4
    path.write_bytes(path.read_bytes()[: places[2].start])
    assert "Completions" in write_report([run], tmp_path / "page.html").read_text()
    with pytest.raises(IsobitError, match=r"step 3 was recorded with run\.completions: none"):
        replay(run, tmp_path / "again")
