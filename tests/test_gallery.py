"""The configs are a gallery: each is listed, says what it shows, and runs as it is."""

import json
import re
from pathlib import Path

import pytest
import yaml

from isobit.config import load_config
from isobit.run.directory import read_jsonl
from isobit.training.parts.base import cached_model
from isobit.training.train import train
from tests.documents import succeed

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
ON_QUICKSTART = [path for path in CONFIGS if "sft: quickstart-sft.yaml" in path.read_text()]
SHOWN = {
    "two-engines": lambda row: (
        row["mismatch/differing_tokens"] > 0 and row["correction/mean_weight"] > 0
    ),
    "quickstart": lambda row: row["mismatch/differing_tokens"] == 0,
    "asynchronous": lambda row: row["staleness/mean"] > 0 and row["replay/groups"] > 0,
    "dapo": lambda row: row["groups/resampled"] > 0,
    "gspo": lambda row: row["clip_fraction"] > 0,
    "kl-reference": lambda row: row["loss/kl"] > 0 and row["memory/reference_mib"] > 0,
    "trackers": lambda row: row["mismatch/differing_tokens"] == 0,
}
"""What each config is there to show, in the metrics of its third step."""


def test_every_config_is_listed() -> None:
    page = (ROOT / "docs" / "configs.md").read_text()
    listed = re.findall(r"\| `isobit (?:train|sft|compare) (configs/[\w-]+\.yaml)` \|", page)
    assert sorted(listed) == [str(path.relative_to(ROOT)) for path in CONFIGS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_says_what_it_shows(path: Path) -> None:
    lines = path.read_text().splitlines()
    comment = [line for line in lines[:4] if line.startswith("# ")]
    assert comment
    assert lines[: len(comment)] == comment


def test_what_is_shown_is_of_every_config_that_runs_here() -> None:
    assert set(SHOWN) == {path.stem for path in ON_QUICKSTART}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_of_a_chat_model_renders_chats(path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    model = values.get("model", {})  # a path stands alone
    name = model if isinstance(model, str) else model.get("path", "")
    if re.search("instruct|chat", str(name), re.IGNORECASE):
        assert values["task"]["chat"] is True


@pytest.mark.slow
@pytest.mark.parametrize("path", ON_QUICKSTART, ids=lambda p: p.stem)
def test_a_config_runs_and_shows_it(
    path: Path, tmp_path: Path, quickstart_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ISOBIT_CACHE", str(quickstart_cache))
    # a quarter of the batch shows the same in less than half of the time
    changes = [
        "steps=3",
        "prompts_per_step=16",
        "evaluation.every=0",
        f"run.dir={tmp_path / 'run'}",
    ]
    result = train(load_config(path, changes))
    rows = list(read_jsonl(result.run_dir / "metrics.jsonl"))
    assert len(rows) == 3
    assert SHOWN[path.stem](rows[-1]), rows[-1]
    assert (tmp_path / "run/report.html").is_file()
    if trackers := load_config(path).tracking.trackers:
        state = json.loads((tmp_path / "run/tracking/state.json").read_text())
        assert set(state) == set(trackers)


@pytest.mark.slow
def test_the_whole_pipeline_runs_in_fp8_as_its_config_says(
    tmp_path: Path, quickstart_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy, reward model, reference and replay; as a control the reward model of the same body
    that scores nothing leaves the rewards to the task."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ISOBIT_CACHE", str(quickstart_cache))
    base, judge = cached_model("configs/quickstart-sft.yaml"), tmp_path / "judge"
    printed = succeed(f"python examples/reward_model.py {base} {judge}", ROOT)
    share = float(re.findall(r"right sum in ([\d.]+) of", printed)[0])
    assert 0.6 < share < 0.95
    config = ROOT / "configs/whole-pipeline.yaml"
    for weight in (0.1, 0.0):
        models = [{"path": str(judge), "precision": "fp8", "weight": weight}]
        changes = ["steps=3", "prompts_per_step=16", "evaluation.every=0", f"model={base}"]
        changes += [
            f"rewards={json.dumps({'models': models})}",
            f"run.dir={tmp_path / str(weight)}",
        ]
        run = load_config(config, changes)
        assert {run.precision, run.reference.precision, run.rewards.models[0].precision} == {"fp8"}
        first, *_, last = read_jsonl(train(run).run_dir / "metrics.jsonl")
        assert first["loss/kl"] == first["mismatch/differing_tokens"] == 0 < last["loss/kl"]
        assert last["mismatch/differing_tokens"] == 0 < last["mismatch/compared_tokens"]
        assert last["replay/groups"] == 16
        assert last["memory/reward_models_mib"] > 0 < last["memory/reference_mib"]
        judged = last["reward/function/reward_model"]
        expected = last["reward/function/correct"] + weight * judged
        assert judged != 0
        assert last["reward/mean"] == pytest.approx(expected, abs=1e-5)
    judge = tmp_path / "judge-of-a-run"
    printed = succeed(f"python examples/reward_model.py {tmp_path / '0.0'} {judge}", ROOT)
    assert "prefers the right sum" in printed
    assert not (judge / "trainer").exists()
