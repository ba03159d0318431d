"""Presets side by side: what is run, what is repeated, and that a run that had to stop is a
result."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from PIL import Image

from benchmarks.pictures import draw_recipes
from isobit.config import CompareConfig, load_compare_config, load_config
from isobit.errors import IsobitError
from isobit.monitor.report.comparison import CURVES
from isobit.monitor.report.intervals import mean_interval
from isobit.run.completions import COMPLETIONS, read
from isobit.run.directory import METRICS, read_jsonl
from isobit.training.commands import compare as comparing
from isobit.training.commands.compare import compare, folder_name
from tests.runs import fingerprint, write_config

PRESETS = ("bf16[engines=separate]", "fp8-rollout", "fp8")


def settings(
    folder: Path, model: Path, presets: tuple[str, ...] = PRESETS, **changes: object
) -> CompareConfig:
    train = write_config(folder, model, evaluation={"every": 2, "samples": 4}, **changes)
    return load_compare_config(train, presets, 2, str(folder / "out"))


def test_every_preset_and_seed_is_a_run_and_the_table_has_them_all(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(settings(tmp_path, base_model)) == 0
    text = capsys.readouterr().out
    lines = {
        line.split("  ")[0]: line
        for line in text.split("Mismatch")[1].split("Cost")[0].splitlines()
    }
    assert " 0 of " in lines["fp8"]
    for preset in PRESETS[:2]:
        assert " 0 of " not in lines[preset]
    values = json.loads((tmp_path / "out/comparison.json").read_text())
    assert list(values) == list(PRESETS)
    assert all(len(value["reward"]) == len(value["accuracy"]) == 2 for value in values.values())
    assert values["fp8"]["differing_tokens"] == [0, 0]
    assert min(values["fp8-rollout"]["kl_k3"]) > max(values["bf16[engines=separate]"]["kl_k3"]) > 0
    assert values["fp8"]["sync_bytes"] == [0, 0]
    assert (
        0
        < values["fp8-rollout"]["sync_bytes"][0]
        < values["bf16[engines=separate]"]["sync_bytes"][0]
    )
    for name, flow in values.items():
        kl, error, accuracy = (flow["curves"][metric] for metric in CURVES)
        runs = [
            list(read_jsonl(tmp_path / "out" / folder_name(name) / f"seed-{seed}" / METRICS))
            for seed in (0, 1)
        ]
        rows = [[row for row in run if "mismatch/kl_k3" in row] for run in runs]
        assert kl["steps"] == error["steps"] == [row["step"] for row in rows[0]]
        for i, pair in enumerate(zip(*rows)):
            found = sorted(row["mismatch/kl_k3"] for row in pair)
            assert [kl["low"][i], kl["high"][i]] == found
            assert kl["values"][i] == pytest.approx(sum(found) / 2)
        assert all((value == 1) is (name == "fp8") for value in error["values"])
        assert accuracy["steps"] == [0, 2, 4]
        assert accuracy["values"][-1] == pytest.approx(sum(flow["accuracy"]) / 2)
    draw_recipes(values, tmp_path / "recipes.png")
    draw_recipes({"fp8": values["fp8"]}, tmp_path / "exact.png")  # nothing above zero
    with Image.open(tmp_path / "recipes.png") as both, Image.open(tmp_path / "exact.png") as exact:
        assert both.size == exact.size
        assert both.convert("RGB").getcolors(1 << 20) != exact.convert("RGB").getcolors(1 << 20)
    page = (tmp_path / "out/comparison.html").read_text()
    assert page.count("<svg") >= 6
    assert all(preset in page for preset in PRESETS)
    # the same prompts for all, and another order for another seed
    first = [
        next(iter(read(tmp_path / "out" / folder_name(preset) / f"seed-{seed}" / COMPLETIONS)))[
            "prompt"
        ]
        for preset in PRESETS
        for seed in (0, 1)
    ]
    assert first[0::2] == [first[0]] * 3
    assert first[1::2] == [first[1]] * 3


def test_seeds_begin_where_the_config_says(tmp_path: Path, base_model: Path) -> None:
    train = write_config(tmp_path, base_model, evaluation={"every": 2, "samples": 4})
    path = tmp_path / "compare.yaml"
    path.write_text(
        f"train: {train}\npresets: [fp8]\nseeds: 2\nfirst_seed: 7\nout: {tmp_path / 'out'}\n"
    )
    compare(load_compare_config(path, [], None, None))
    assert sorted(folder.name for folder in (tmp_path / "out" / "fp8").iterdir()) == [
        "seed-7",
        "seed-8",
    ]
    assert load_config(tmp_path / "out/fp8/seed-8/config.yaml").seed == 8


def test_what_is_finished_is_not_repeated_and_what_was_interrupted_goes_on(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    compare(settings(tmp_path / "whole", base_model, ("fp8",)))
    config = settings(tmp_path / "cut", base_model, ("fp8",))
    compare(dataclasses.replace(config, seeds=1))
    run = tmp_path / "cut/out/fp8/seed-0"
    newest = (run / "metrics.jsonl").stat().st_mtime_ns
    (tmp_path / "cut/out/comparison.html").unlink()
    original = comparing.train

    def interrupted(config: object, **options: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(config)
    monkeypatch.setattr(comparing, "train", original)
    assert compare(config) == 0
    assert (run / "metrics.jsonl").stat().st_mtime_ns == newest
    for seed in (0, 1):
        found, whole = (tmp_path / part / f"out/fp8/seed-{seed}" for part in ("cut", "whole"))
        assert fingerprint(found) == fingerprint(whole)


def test_a_run_that_had_to_stop_is_a_result(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nan.py").write_text(
        "def digits(prompts, completions, **columns):\n    raise RuntimeError('no reward today')\n"
    )
    reward = f"{tmp_path / 'nan.py'}:digits"
    assert (
        compare(
            settings(
                tmp_path, base_model, ("bf16", "fp8"), rewards={"functions": [{"function": reward}]}
            )
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "fp8, seed-1: stopped: " in text
    assert "no reward today" in text
    assert "0 of 2" in text
    assert not json.loads((tmp_path / "out/bf16/seed-0/outcome.json").read_text())["finished"]


def test_weights_that_blow_up_are_a_result_too(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(settings(tmp_path, base_model, ("fp8",), optimizer={"learning_rate": 1e30})) == 0
    assert "the run diverged" in capsys.readouterr().out


def test_what_cannot_be_compared_is_said(tmp_path: Path, base_model: Path) -> None:
    train = write_config(tmp_path, base_model)
    with pytest.raises(IsobitError, match="say what to compare with --presets"):
        load_compare_config(train, [], 1, None)
    with pytest.raises(IsobitError, match="unknown precision preset 'fp9'"):
        load_compare_config(train, ["fp9"], 1, None)
    with pytest.raises(IsobitError, match="presets: one of them is there twice"):
        load_compare_config(train, ["fp8", "bf16", "fp8"], 1, None)
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.safe_dump({"train": str(train), "presets": ["fp8"], "seed": 2}))
    with pytest.raises(IsobitError, match=r"unknown key 'seed' \(did you mean 'seeds'"):
        load_compare_config(path, [], None, None)
    path.write_text(
        yaml.safe_dump({"train": str(train), "presets": ["fp8"], "out": str(tmp_path / "out")})
    )
    compare(load_compare_config(path, [], None, None))
    path.write_text(
        yaml.safe_dump(
            {
                "train": str(train),
                "presets": ["fp8"],
                "changes": ["steps=5"],
                "out": str(tmp_path / "out"),
            }
        )
    )
    with pytest.raises(IsobitError, match="a run of another configuration"):
        compare(load_compare_config(path, [], None, None))


@pytest.mark.parametrize(
    ("written", "changes"),
    [(None, ("steps=2",)), ("steps=5", ("steps=5", "steps=2")), ([], ("steps=2",))],
)
def test_changes_are_one_text_or_a_list(
    tmp_path: Path, base_model: Path, written: object, changes: tuple[str, ...]
) -> None:
    """Those of the command line come after those of the file."""
    path = tmp_path / "compare.yaml"
    values = {"train": str(write_config(tmp_path, base_model)), "presets": ["fp8"]}
    path.write_text(yaml.safe_dump({**values, "changes": written}))
    assert load_compare_config(path, [], None, None, ["steps=2"]).changes == changes


def test_students_interval() -> None:
    assert mean_interval([0.5]) == (0.5, 0.5, 0.5)
    mean, low, high = mean_interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == (
        2.0,
        pytest.approx(2 - 4.302653 / 3**0.5),
        pytest.approx(2 + 4.302653 / 3**0.5),
    )
