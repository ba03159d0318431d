"""The report: one page, self-contained, of whatever a run holds."""

import json
import re
from pathlib import Path

import pytest

from isobit.errors import IsobitError
from isobit.report import write_report
from isobit.report.plots import PANELS

EVIL = "<script>alert('x')</script>\x1b[31m\x00<img src=x onerror=alert(1)>"


def run_directory(folder: Path, steps: int = 3, differing: int = 0, **extra: float | None) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {path: '<b>base</b>'}\n")
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
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


def page_of(*runs: Path) -> str:
    return write_report(list(runs), runs[0] / "report.html").read_text(encoding="utf-8")


def test_the_page_holds_what_people_look_for(tmp_path: Path) -> None:
    page = page_of(run_directory(tmp_path / "run"))
    assert (
        "0 differing tokens in 3 of 3 steps, 300 tokens compared: rollout and learner computed the same bits throughout"
        in page
    )
    for title in ("Reward", "Held-out accuracy", "Completion length", "Mismatch", "Rollout throughput", "Memory"):
        assert re.search(f"<figcaption>{title}[^<]*</figcaption><svg", page), title
    assert "Gradient norm" not in page  # nothing finite to draw
    assert page.count("1+1=") >= 6
    assert "&lt;b&gt;base&lt;/b&gt;" in page


def test_the_page_is_self_contained_and_harmless(tmp_path: Path) -> None:
    page = page_of(run_directory(tmp_path / "run"))
    assert "&lt;script&gt;alert(" in page
    assert not re.search(r"<script|<img|<link|<iframe|@import|\x1b|\x00", page)
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)[^"']*""", page)
    assert not fetched
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_mismatch_is_said_as_plainly(tmp_path: Path) -> None:
    page = page_of(run_directory(tmp_path / "run", differing=7))
    assert (
        "0 differing tokens in 0 of 3 steps, 300 tokens compared; largest mean probability ratio error 1.0070" in page
    )
    assert "throughout" not in page


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    page = page_of(run_directory(tmp_path / "first"), run_directory(tmp_path / "second", 2, 3))
    assert "first: 0 differing tokens in 3 of 3" in page
    assert "second: 0 differing tokens in 0 of 2" in page
    assert page.count("Configuration of") == 2


def test_one_step_and_no_completions(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", 1)
    (run / "completions.jsonl").unlink()
    assert "<svg" in page_of(run)


def test_what_cannot_be_reported_is_said(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    with pytest.raises(IsobitError, match="cannot write report"):
        write_report([run], tmp_path / "gone" / "report.html")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(IsobitError, match="no step has been recorded yet"):
        page_of(run)
    with pytest.raises(IsobitError, match="not a run directory"):
        page_of(tmp_path)


def test_every_panel_draws_defined_metrics() -> None:
    from isobit.metrics import METRICS

    assert {metric for panel in PANELS for metric in panel.metrics} <= set(METRICS)
