"""The report: one page, self-contained, of whatever a run holds."""

import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from isobit.errors import IsobitError
from isobit.monitor.report import write_report
from isobit.monitor.report.document import embedded
from isobit.monitor.report.intervals import student_quantile
from isobit.monitor.report.page import _read, run_names
from isobit.monitor.report.panels import ALL, DERIVED, with_derived
from isobit.run import durable
from isobit.run.completions import COMPLETIONS, pack
from isobit.run.metrics import METRICS
from tests import browser
from tests.report.recorded_run import write_run

EVIL = "<script>alert('x')</script>\x1b[31m\x00<img src=x onerror=alert(1)>"


class Parsed(HTMLParser):
    """Elements of a page, and the data embedded in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[Any] = []
        self._in_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_data = tag == "script" and dict(attrs).get("type") == "application/json"

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data.append(json.loads(data))
        self._in_data = False


def run_directory(folder: Path, steps: int = 3, differing: int = 0, **extra: float | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "format.txt").write_text("2\n")
    (folder / "config.yaml").write_text("model: {path: '<b>base</b>'}\nprecision: fp8\n")
    rows = [
        {
            "step": step,
            "reward/mean": 0.1 * step,
            "reward/std": 0.3,
            "accuracy/held_out": 0.2 * step,
            "length/mean": 5.0,
            "length/truncated_fraction": 0.0,
            "mismatch/differing_tokens": differing,
            "mismatch/compared_tokens": 100,
            "mismatch/kl_k3": 0.0,
            "mismatch/token_mult_prob_error": 1.0 + differing / 1000,
            "throughput/rollout_tokens_per_s": 1000.0,
            "time/rollout": 1.0,
            "time/learn": 2.0,
            "memory/peak_rss_mib": 100.0,
            "grad_norm": None,
            **extra,
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [
        {"step": step, "prompt_index": i, "prompt": "1+1=", "completion": text, "reward": reward}
        for step in range(1, steps + 1)
        for i, (text, reward) in enumerate([(EVIL, 0.0), ("2", 1.0), ("none", None)])
    ]
    (folder / COMPLETIONS).write_bytes(pack(samples[:5]) + pack(samples[5:]))
    return folder


def page_of(*runs: Path) -> str:
    return write_report(list(runs), runs[0] / "report.html").read_text(encoding="utf-8")


def test_the_page_holds_what_people_look_for(tmp_path: Path) -> None:
    page = page_of(
        run_directory(
            tmp_path / "run", **{"accuracy/pass_at_8": 0.5, "accuracy/majority_at_8": 0.4}
        )
    )
    assert (
        "0 differing tokens in 3 of 3 steps, 300 tokens compared: rollout and learner computed "
        "the same bits throughout"
    ) in page
    for title in (
        "Reward",
        "Held-out accuracy",
        "Completion length",
        "Mismatch",
        "Throughput",
        "Time by phase",
    ):
        assert re.search(f"<figcaption>{title}.*?<svg", page), title
    assert "pass at 8</li>" in page
    assert "majority at 8</li>" in page
    assert "exactly 0" in page
    assert "Gradient norm" not in page  # nothing finite to draw
    assert "&lt;b&gt;base&lt;/b&gt;" in page
    assert "All 9 completions, of 3 of 3 steps." in page


def test_what_is_made_of_metrics_is_drawn(tmp_path: Path) -> None:
    """The control: without the numbers that it is made of there is nothing to draw."""
    titles = [panel.title for panel in ALL if {*panel.metrics} <= {*DERIVED}]
    assert len(titles) == len(DERIVED)
    found = page_of(run_directory(tmp_path / "run", differing=50))
    nothing = {"mismatch/token_mult_prob_error": None, "mismatch/compared_tokens": None}
    without = page_of(run_directory(tmp_path / "without", differing=50, **nothing))
    for title in titles:
        assert re.search(f"<figcaption>{title}.*?<svg", found), title
        assert not re.search(f"<figcaption>{title}.*?<svg", without), title


def test_the_page_is_self_contained_and_harmless(tmp_path: Path) -> None:
    page = page_of(run_directory(tmp_path / "run"))
    parsed = Parsed(page)
    assert not re.search(r"@import|url\(|\x1b|\x00", page)
    assert {tag for tag, _ in parsed.tags}.isdisjoint(
        {"img", "link", "iframe", "object", "embed", "base", "form"}
    )
    attributes = {name for _, given in parsed.tags for name in given}
    assert not {
        name for name in attributes if name.startswith("on") or name in ("src", "href", "srcdoc")
    }
    scripts = [given for tag, given in parsed.tags if tag == "script" and not given.get("type")]
    assert len(scripts) == 1
    policy = next(given["content"] for tag, given in parsed.tags if given.get("http-equiv"))
    assert re.fullmatch(
        r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/]{43}='; "
        r"base-uri 'none'",
        policy or "",
    )
    assert EVIL in [row.get("text") for data in parsed.data for row in data.get("rows", ())]


def test_embedded_data_is_inert_and_exact() -> None:
    data = {
        "text": "</script><!--<script>&\u2028\u2029\ud800",
        "nan": float("nan"),
        "list": [1.0, float("inf"), 0.5],
    }
    text = embedded(data)
    inside = text.removeprefix("<script type='application/json'>").removesuffix("</script>")
    assert not set(inside) & set("<>&\u2028\u2029")
    assert json.loads(inside) == {
        "text": "</script><!--<script>&\u2028\u2029?",
        "nan": None,
        "list": [1, None, 0.5],
    }


def test_mismatch_is_said_as_plainly(tmp_path: Path) -> None:
    page = page_of(run_directory(tmp_path / "run", differing=7))
    assert (
        "0 differing tokens in 0 of 3 steps, 300 tokens compared; largest mean probability "
        "ratio error 1.0070"
    ) in page
    assert "throughout" not in page
    assert "<div><dt>tokens that differ</dt>" in page


def test_how_many_tokens_were_compared_is_said(tmp_path: Path) -> None:
    page = page_of(run_directory(tmp_path / "run", **{"mismatch/comparable_tokens": 1600}))
    assert (
        "0 differing tokens in 3 of 3 steps, 300 of 4,800 tokens compared: rollout and learner "
        "computed the same"
    ) in page
    assert "throughout" not in page
    assert "<div><dt>tokens that differ</dt><dd>0 of 300 compared</dd></div>" in page


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    """Runs of one name are told apart by their folders; what differs between their configurations
    is said."""
    runs = [
        run_directory(tmp_path / name / "seed-0", 2, differing)
        for name, differing in (("a", 0), ("b", 3))
    ]
    (runs[1] / "config.yaml").write_text(
        "model: {path: '<b>base</b>'}\nprecision: {preset: fp8, wgrad: bf16}\n"
    )
    page = page_of(*runs)
    assert "a/seed-0: 0 differing tokens in 2 of 2" in page
    assert "b/seed-0: 0 differing tokens in 0 of 2" in page
    differs = page.split("What differs")[1].split("<details")[0]
    assert "precision.wgrad" in differs
    assert "model.path" not in differs
    assert run_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert run_names([tmp_path / "a", tmp_path / "a"]) == ["a (1)", "a (2)"]


def test_one_step_and_no_completions(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", 1)
    (run / COMPLETIONS).unlink()
    page = page_of(run)
    assert "<svg" in page
    assert "part-completions" not in page
    assert "part-prompts" not in page


@pytest.mark.parametrize("empty", [True, False])
def test_completions_that_are_gone_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], empty: bool
) -> None:
    """Emptied, or removed. The controls: a run that kept none, and one whose steps had none."""
    run = run_directory(tmp_path / "run", 2, **{"advantage/nonzero_fraction": 1.0})
    without = run_directory(tmp_path / "without", 2)
    for each in (run, without):
        (each / COMPLETIONS).write_bytes(b"") if empty else (each / COMPLETIONS).unlink()
    page_of(run)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        f"{run / COMPLETIONS}: holds no completions, and 2 steps learned from some: it was emptied "
        "or removed"
    )
    page_of(without)
    (run / "config.yaml").write_text("model: {path: base}\nrun:\n  completions: none\n")
    page_of(run)
    assert capsys.readouterr().err == ""


def test_what_cannot_be_reported_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory(tmp_path / "run")
    with pytest.raises(IsobitError, match="cannot write report"):
        write_report([run], tmp_path / "gone" / "report.html")
    with pytest.raises(IsobitError, match="not a run directory"):
        page_of(tmp_path)
    (run / COMPLETIONS).write_bytes(pack([{"step": 1, "reward": 0}, {"no step": 1}]))
    page_of(run)
    assert (
        "completions.jsonl.gz: 1 row or step cannot be read and left out; the first: row 2: step is"
        in capsys.readouterr().err
    )
    (run / COMPLETIONS).unlink()
    (run / "config.yaml").write_text("just text")
    with pytest.raises(
        IsobitError, match=r"config\.yaml is not a configuration: expected keys and values in YAML"
    ):
        page_of(run)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(IsobitError, match="no step has been recorded yet"):
        page_of(run)


def test_a_full_disk_leaves_the_page_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, page = run_directory(tmp_path / "run"), tmp_path / "page.html"
    page.write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "fsync", full)
        with pytest.raises(
            IsobitError, match=r"cannot write report .*page.html: No space left on device"
        ):
            write_report([run], page)
    assert page.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]
    write_report([run], page)  # the control
    assert page.read_text() != "before"


def test_every_panel_draws_defined_metrics() -> None:
    named = {metric for panel in ALL for metric in panel.metrics if "*" not in metric}
    assert named <= {*METRICS, *DERIVED}
    derived = with_derived(
        {"mismatch/token_mult_prob_error": 1.5, "mismatch/differing_tokens": 1.0}
    )
    assert derived["mismatch/token_mult_prob_error-1"] == 0.5
    assert "mismatch/differing_fraction" not in derived


def test_a_missing_browser_is_a_skip_or_an_error_but_never_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browser, "CHROMIUM", tmp_path / "chromium")
    monkeypatch.delenv("ISOBIT_REQUIRE_BROWSER", raising=False)
    with pytest.raises(
        pytest.skip.Exception, match=r"chromium is not here|playwright is not installed"
    ):
        browser.require_browser()
    monkeypatch.setenv("ISOBIT_REQUIRE_BROWSER", "1")
    with pytest.raises(
        pytest.fail.Exception, match=r"chromium is not here|playwright is not installed"
    ):
        browser.require_browser()


def test_the_mismatch_by_position_is_the_mean_over_the_steps_that_differ(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", steps=2, differing=5)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    added = [{"from_1": 0.1, "from_64": 0.4}, {"from_1": 0.3}, {}]
    given = [
        row | {f"mismatch/kl_k3_{n}": v for n, v in more.items()}
        for row, more in zip([*rows, rows[0]], added)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    page = page_of(run)
    assert "Mismatch by position in the completion" in page
    lines = [data["lines"] for data in Parsed(page).data if data.get("axis") == "token"]
    assert [[(line["x"], line["y"]) for line in chart] for chart in lines] == [
        [([1, 64], [0.2, 0.4])]
    ]
    control = page_of(run_directory(tmp_path / "same"))
    assert "Mismatch by position in the completion" not in control


@pytest.mark.slow
def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1000, completions=24, tokens=40)
    path = write_report([run, run], run / "report.html")
    assert 1e6 < path.stat().st_size < 5e6
    page = path.read_text(encoding="utf-8")
    found = [data for data in Parsed(page).data if "pieces" in data]
    assert len(found) == 2
    rows = found[0]["rows"]
    assert f"{len(rows):,} of 24,000 completions" in page
    steps = sorted({row["step"] for row in rows})
    assert steps[0] == 1
    assert steps[-1] == 1000
    assert max(b - a for a, b in pairwise(steps)) < 64  # evenly spread


def test_the_band_of_a_reward_ends_where_rewards_end(tmp_path: Path) -> None:
    """Two prompts of which one is solved: Student's interval of a mean of two values is far wider
    than what rewards can be. The control is a run that also had rewards far outside, whose band is
    the interval."""
    bands = []
    for extra in (0.0, 40.0):
        run = run_directory(tmp_path / f"run{extra}", steps=2)
        given = {1: {"a": 0.0, "b": 1.0}, 2: {"a": extra, "b": -extra}}
        packed = b""
        for step, rewards in given.items():
            rows = [
                {"step": step, "prompt": p, "completion": "x", "reward": r}
                for p, r in rewards.items()
            ]
            packed += pack(rows)
        (run / COMPLETIONS).write_bytes(packed)
        row = _read(run, "run", 1).series.rows[0]
        bands.append((row["reward/mean:low"], row["reward/mean:high"]))
    mean, half = (
        0.1,
        student_quantile(1) * math.sqrt(0.5) / math.sqrt(2),
    )  # of step 1 in `run_directory`
    assert bands[0] == (0.0, 1.0)
    assert bands[1] == pytest.approx((mean - half, mean + half))
