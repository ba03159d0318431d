"""The tables of memory in the documentation are those of the results, and of the planner."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import fits
from benchmarks.plan_jobs import MODELS
from benchmarks.step_memory import LEVELS, PRESETS
from isobit.model.hub.shapes import parameter_shapes
from isobit.precision.flow import LINEAR_LAYERS
from isobit.training.plan import advice

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_page_has_what_fits() -> None:
    page = (ROOT / "docs/how-to/plan.md").read_text()
    lines = fits.table()
    assert len(lines) == 2 + len(fits.PRESETS) * len(fits.TRAINED) + len(fits.FROZEN)
    assert "\n".join(lines) in page


@pytest.mark.slow
def test_the_page_has_what_gpus_hold_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of one dense model, and one of a mixture, without the fewest GPUs, which take
    minutes. The control has less memory to leave."""
    page = (ROOT / "docs/how-to/cluster.md").read_text()
    monkeypatch.setattr(fits, "TOGETHER", ("Qwen3-32B", "Qwen3-30B-A3B"))
    monkeypatch.setattr(fits, "_MANY_RANKS", (8,))
    rows = [line.rsplit(" | ", 2)[0] for line in fits.together()[2:]]
    assert len(rows) == 4
    assert all(row in page for row in rows)
    monkeypatch.setattr(advice, "HEAD_ROOM", 0.5)
    assert not all(line.rsplit(" | ", 2)[0] in page for line in fits.together()[2:])


@pytest.mark.slow
def test_the_page_by_hardware_has_what_one_gpu_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/how-to/hardware.md").read_text()
    lines = fits.largest()
    assert len(lines) == 2 + len(fits.RECIPES)
    assert "\n".join(lines) in page
    monkeypatch.setattr(advice, "HEAD_ROOM", 0.3)  # the control
    assert "\n".join(fits.largest()) not in page


@pytest.mark.slow
def test_the_page_by_hardware_has_what_the_largest_gpu_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last column, of adapters: one model each."""
    page = (ROOT / "docs/how-to/hardware.md").read_text()
    name = list(fits.ONE_GPU)[-1]
    monkeypatch.setattr(fits, "ONE_GPU", {name: fits.ONE_GPU[name]})
    monkeypatch.setattr(fits, "RECIPES", fits.RECIPES[-2:])
    assert all("adapter" in what for what, *_ in fits.RECIPES)
    for control in (False, True):
        cells = [line.split(" | ") for line in fits.largest()[2:]]
        rows = [
            line
            for what, preset, _ in cells
            for line in page.splitlines()
            if line.startswith(f"{what} | {preset} |")
        ]
        assert len(rows) == 2
        ends = [row.endswith(f" | {end}") for row, (*_, end) in zip(rows, cells)]
        assert all(ends) is not control
        monkeypatch.setattr(advice, "HEAD_ROOM", 0.5)


@pytest.mark.slow
def test_a_table_of_another_job_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "HEAD_ROOM", 0.3)
    assert "\n".join(fits.table()) not in (ROOT / "docs/how-to/plan.md").read_text()


def test_the_page_has_the_counted_bytes_of_a_frozen_base() -> None:
    parts = json.loads((ROOT / "benchmarks/results/frozen_base.json").read_text())["parts"]
    page = (ROOT / "docs/how-to/adapters.md").read_text()
    config = MODELS["Qwen3-8B"]
    linear = sum(
        math.prod(s)
        for name, s in parameter_shapes(config).items()
        if name.rpartition(".")[2] in LINEAR_LAYERS
    )
    for preset, found in parts.items():
        stored, packs = found["codes and scales"], found["packs of the native backend"]
        line = f"| `{preset}` | {stored:.1f} | {packs:.1f} | {stored * linear / 2**33:.1f} GiB |"
        assert line in page
        assert line.replace(f"{stored:.1f}", f"{stored + 1:.1f}") not in page  # the control


def test_the_page_has_the_measured_times_of_a_frozen_base() -> None:
    claims = json.loads((ROOT / "benchmarks/results/frozen_base.json").read_text())["claims"]
    page = " ".join((ROOT / "docs/how-to/adapters.md").read_text().split())
    one, eight, many = (each["value"] for each in claims if each["what"].endswith("of FP8"))

    def said(one: float) -> str:
        return (
            f"takes {one:.1f} times as long as in FP8 for one row, {eight:.1f} times for eight, and "
            f"{many:.1f} times for 256"
        )

    assert said(one) in page
    assert said(one + 1) not in page  # the control


def test_the_page_has_the_counted_steps() -> None:
    parts = json.loads((ROOT / "benchmarks/results/step_memory.json").read_text())["parts"]
    page = (ROOT / "docs/measured.md").read_text()
    for preset in PRESETS:
        cells = [sum(parts[f"{preset}, {level}"].values()) / 2**20 for level in LEVELS]
        held = parts[f"{preset}, false"]["held"] / 2**20
        assert (
            f"| `{preset}` | {held:.0f} | {' | '.join(f'{cell:.0f}' for cell in cells)} |" in page
        )
    for masters in ("FP32", "BF16"):
        for moments, words in (("FP32", ""), ("8 bits", "8-bit moments")):
            what = (
                ", ".join(filter(None, ("BF16 masters" if masters == "BF16" else "", words)))
                or "false"
            )
            found = parts[f"fp8, {what}"]
            line = (
                f"| {masters} | {moments} | {found['held'] / 2**20:.0f} | "
                f"{sum(found.values()) / 2**20:.0f} |"
            )
            assert line in page


def test_the_page_has_the_counted_bytes_of_a_token() -> None:
    parts = json.loads((ROOT / "benchmarks/results/saved_bytes.json").read_text())["parts"]
    page = (ROOT / "docs/measured.md").read_text()
    for level, words in (("false", ""), ("mlp", ", activation_checkpointing: mlp")):
        cells = {
            preset: [sum(parts[f"hidden {h}{words}, {preset}"].values()) for h in (512, 2048)]
            for preset in ("bf16", "fp8")
        }
        assert cells["bf16"] == cells["fp8"]
        assert f"| `{level}` | {cells['fp8'][0]:,.0f} | {cells['fp8'][1]:,.0f} |" in page
