"""The command of docs/gpu.md, rehearsed: every stage runs at toy sizes on the CPU; and the roofline's arithmetic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.shapes import SHAPES, shortened
from benchmarks.gpu.targets import NOT_MEASURED, table, targets
from benchmarks.roofline import H200, grpo_step, largest_batch
from isobit.plan.memory import num_parameters
from isobit.plan.work import Work, decode, floor, learn
from isobit.precision import PRESETS

ROOT = Path(__file__).resolve().parents[1]


def _run(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_every_stage_runs_in_a_rehearsal(tmp_path: Path) -> None:
    _run("--rehearse", "--out", str(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rehearsal"] is True
    assert summary["tests"]["failed"] == 0 < summary["tests"]["passed"]
    assert set(summary["stages"].values()) == {"ended"}
    for stage in summary["stages"]:
        found = json.loads((tmp_path / f"{stage}.json").read_text())
        assert found["rows"], stage
        assert found["missing"] == []
        assert found["machine"]["commit"]
    steps = json.loads((tmp_path / "grpo.json").read_text())["rows"]
    differing = {row["contestant"]: row["differing_tokens"] for row in steps}
    assert differing["fp8, bitwise"] == differing["bf16, bitwise"] == 0 < differing["fp8-rollout, bitwise"]


def test_stages_need_little(tmp_path: Path) -> None:
    """A machine with a GPU may have PyTorch, Triton and not much else: configurations are not read."""
    names = ", ".join(
        f"benchmarks.gpu.{name}" for name in ("ceilings", "kernels", "decode", "learner", "grpo", "__main__")
    )
    code = f"import sys; sys.modules['transformers'] = None; import {names}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "x", "--only", "speed"), "unknown stage 'speed'"),
        (("--out", "x"), "PyTorch sees no GPU; --rehearse runs toy sizes on the CPU"),
    ],
)
def test_what_cannot_run_is_refused(arguments: tuple[str, ...], message: str) -> None:
    done = _run(*arguments, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_shapes_have_the_parameters_of_their_names() -> None:
    """Embeddings included, as the models are named."""
    billions = {name: num_parameters(config) / 1e9 for name, config in SHAPES.items()}
    assert billions == pytest.approx(
        {"Qwen3-0.6B": 0.60, "Qwen3-1.7B": 1.72, "Qwen3-8B": 8.19, "Qwen3-30B-A3B": 30.5}, rel=0.01
    )
    half = shortened(SHAPES["Qwen3-8B"], 8e9, 2)
    assert half.num_layers < 36
    assert 2 * num_parameters(half) <= 8e9


def test_floors_are_bytes_or_operations() -> None:
    assert Work(bytes=4.3e12).seconds(H200) == pytest.approx(1.0)
    assert Work(bf16=790e12, fp8=1580e12, bytes=1).seconds(H200) == pytest.approx(2.0)
    config, bf16 = SHAPES["Qwen3-8B"], PRESETS["bf16"]
    # one sequence without keys reads every weight once: 8.19 billion less the embedding, two bytes each
    weights = 2 * (num_parameters(config) - config.vocab_size * config.hidden_size)
    assert floor(decode(config, bf16, 1, 0), H200) == pytest.approx(weights / 4.3e12, rel=0.01)
    # of a long batch the linear layers take 6 operations a parameter and token
    linear = learn(config, bf16, 1 << 20, 1024)["linear"].bf16
    outside = 2 * config.vocab_size * config.hidden_size
    assert linear == pytest.approx(6 * (1 << 20) * (num_parameters(config) - outside), rel=0.01)


def test_fp8_wins_at_most_what_its_bytes_and_rate_allow() -> None:
    for config in SHAPES.values():
        for batch, context in ((1, 1024), (64, 8192), (512, 1024)):
            wide, weights, all_low = (
                floor(decode(config, PRESETS[p], batch, context), H200) for p in ("bf16", "fp8-rollout", "fp8")
            )
            assert 1 < wide / weights < wide / all_low < 2
    small = SHAPES["Qwen3-0.6B"]
    steps = [grpo_step(small, PRESETS[p], 512, 8, 512, 2048, 512)["learn"] for p in ("bf16", "fp8")]
    assert steps[0] / steps[1] < 1.45, "docs/gpu.md says that this target is out of reach"
    assert largest_batch(small, PRESETS["fp8"], 8192) > 1.8 * largest_batch(small, PRESETS["bf16"], 8192)


def _stage(folder: Path, name: str, rows: list[dict[str, object]], rehearsal: bool = False) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows, "rehearsal": rehearsal}))


def _step(contestant: str, rollout: float, learn: float, peak: int, differing: float = 0.0) -> dict[str, object]:
    values = {"rollout_s": rollout, "seconds": rollout + learn, "peak_bytes": {"rollout": 1, "learn": peak}}
    return {"case": "a", "contestant": contestant, "differing_tokens": differing, **values}


def test_targets_are_ratios_within_a_case(tmp_path: Path) -> None:
    assert all(target.measured == NOT_MEASURED for target in targets(tmp_path))
    assert table(tmp_path).count(NOT_MEASURED) == len(targets(tmp_path)) + 1
    contestants = [("bf16, bitwise", 8.0, 4.0, 100), ("fp8, bitwise", 4.0, 2.0, 60), ("fp8, fast", 3.0, 2.0, 60)]
    steps = [_step(*contestant) for contestant in contestants]
    alone = {**_step("bf16, bitwise", 1.0, 1.0, 1), "case": "without a partner"}
    _stage(tmp_path, "grpo", [*steps, alone])
    parts = (("forward and backward", 3.0, 1.5), ("update and sync", 1.0, 0.5), ("prefill", 9.0, 1.0))
    _stage(
        tmp_path,
        "learner",
        [
            {"case": f"a, 2 x 8 tokens, {part}", "contestant": f"{preset}, bitwise", "seconds": seconds}
            for part, *both in parts
            for preset, seconds in zip(("bf16", "fp8"), both)
        ],
    )
    shares = [{"case": case, "contestant": "fp8", "share": share} for case, share in (("a", 0.5), ("b", 0.75))]
    _stage(tmp_path, "decode", shares)
    _stage(tmp_path, "kernels", [{"case": "a o, 1 tokens", "contestant": "fp8 loses", "seconds": 3.0, "floor_s": 2.0}])
    values = [target.values for target in targets(tmp_path)]
    assert values == [(0.0, 0.0, 0.0), (2.0,), (2.0,), (2.0,), (1.2,), (0.5, 0.75), (0.6,)]
    assert targets(tmp_path)[5].measured == "0.50 to 0.75 of it, 2 cases"
    assert "a o, 1 tokens: 1.50 × BF16's time" in table(tmp_path)
    _stage(tmp_path, "grpo", steps, rehearsal=True)
    assert targets(tmp_path)[1].measured == NOT_MEASURED
