"""The command of docs/gpu.md, rehearsed: every stage runs at toy sizes on the CPU; and the
roofline's arithmetic."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.__main__ import STAGES
from benchmarks.gpu.common import random_model
from benchmarks.gpu.decode import decode_step
from benchmarks.gpu.reached import decode_table
from benchmarks.gpu.results import FILE, measured
from benchmarks.gpu.shapes import SHAPES, shortened
from benchmarks.gpu.targets import (
    LAUNCH_BOUND,
    NOT_MEASURED,
    bits_table,
    ceilings_table,
    table,
    targets,
)
from benchmarks.gpu.tests import GROUPS
from benchmarks.roofline import H200, grpo_step, largest_batch
from benchmarks.work import Work, decode, floor, learn, prefill
from isobit.model import Experts, ModelConfig
from isobit.model.hub.shapes import parameter_shapes
from isobit.precision import PRESETS
from isobit.training.plan.learning import Backward
from isobit.training.plan.memory import num_parameters
from isobit.training.plan.meta import Described, learning_bytes, page_bytes, weight_bytes
from tests.models import NANO_3, NEMOTRON_8B, SUPER_3

ROOT = Path(__file__).resolve().parents[1]


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_the_first_minutes_on_a_gpu_are_rehearsed(tmp_path: Path) -> None:
    """Every stage, as one call after the other runs it: the second call finds nothing left."""
    printed = _run("first", "--rehearse", "--out", str(tmp_path)).stdout
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert lines[0]["rehearsal"] is True
    assert lines[0]["machine"]["commit"]
    assert {line["stage"]: line["ended"] for line in lines if "ended" in line} == dict.fromkeys(
        STAGES, "ended"
    )
    cases = [line for line in lines if line.get("status", "started") != "started"]
    assert {line["status"] for line in cases} == {"done"}
    assert {line["stage"] for line in cases} == set(STAGES)
    rows = {
        name: [row for line in cases if line["stage"] == name for row in line.get("rows", [])]
        for name in STAGES
    }
    assert all(rows.values())
    assert {row["expected"] for row in rows["bits"] if "expected" in row} == {"equal", "different"}
    assert all(
        row["holds"]
        for name in ("bits", "tests", "sanitizer")
        for row in rows[name]
        if "holds" in row
    )
    steps = [row for row in rows["grpo"] if "differing_tokens" in row]
    differing = {row["contestant"]: row["differing_tokens"] for row in steps}
    assert (
        differing["fp8, bitwise"]
        == differing["bf16, bitwise"]
        == 0
        < differing["fp8-rollout, bitwise"]
    )
    assert all("share" in row for row in rows["decode"]), (
        "floors are of the ceilings that were measured"
    )
    assert "0 failed" in printed
    again = tmp_path / "again"
    printed = _run("kernels", "--rehearse", "--out", str(again), "--resume", str(tmp_path)).stdout
    assert "kernels: ended before" in printed
    assert measured(tmp_path, "grpo") == [], "a rehearsal measures nothing"


MISSING = ("pydantic", "transformers", "pyarrow", "datasets", "math_verify", "rapidfuzz",
    "playwright",
           "ray", "wandb", "trackio", "mlflow", "tensorboard", "matplotlib")  # fmt: skip
"""What a machine with a GPU may lack of what isobit or its tests can use."""
_BLOCKED = f"import sys\nfor name in {MISSING!r}: sys.modules[name] = None\n"


def _python(code: str, tmp_path: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A process that finds this tree and not an installed isobit, and lacks the packages above."""
    given = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "TRITON_INTERPRET")
    }
    given |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    words = [sys.executable, "-c", _BLOCKED + code]
    return subprocess.run(
        words, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_stages_need_little(tmp_path: Path) -> None:
    """A machine with a GPU may have PyTorch, Triton and not much else: neither packages nor
    configurations are read."""
    names = ", ".join(
        f"benchmarks.gpu.{name}" for name in (*STAGES, "__main__", "page", "two_processes")
    )
    done = _python(
        f"import {names}\nprint([m for m in sys.modules if m.startswith('isobit.c')])", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "isobit.training.commands" not in done.stdout
    assert "isobit.cli" not in done.stdout
    control = _python("import pydantic", tmp_path)
    assert "ModuleNotFoundError" in control.stderr


@pytest.mark.slow
def test_the_tests_of_that_machine_need_little_too(tmp_path: Path) -> None:
    """They are collected without the packages: what a conftest imports would end all of them."""
    chosen = [str(ROOT / path) for paths, _ in GROUPS.values() for path in paths]
    code = "import pytest\n"
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *chosen]
    code += f"sys.exit(pytest.main({options!r}))"
    done = _python(code, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("speed", "--out", "x"), "unknown stage 'speed'"),
        (("--out", "x"), "PyTorch sees no GPU; --rehearse runs toy sizes on the CPU"),
    ],
)
def test_what_cannot_run_is_refused(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


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
    # one sequence without keys reads every weight once: 8.19 billion less the embedding, two bytes
    # each
    weights = 2 * (num_parameters(config) - config.vocab_size * config.hidden_size)
    assert floor(decode(config, bf16, 1, 0), H200) == pytest.approx(weights / 4.3e12, rel=0.01)
    # of a long batch the linear layers take 6 operations a parameter and token
    linear = learn(config, bf16, 1 << 20, 1024)["linear"].bf16
    outside = 2 * config.vocab_size * config.hidden_size
    assert linear == pytest.approx(6 * (1 << 20) * (num_parameters(config) - outside), rel=0.01)


def _one_part(pattern: str) -> ModelConfig:
    """Nemotron 3 Nano with these layers."""
    layers = {"num_hidden_layers": len(pattern), "hybrid_override_pattern": pattern}
    return ModelConfig.from_hf(NANO_3 | layers)


def test_floors_of_layers_of_one_part() -> None:
    """A layer has what its part has: Nemotron-H 8B multiplies all of its weights, Nemotron 3 those
    of its experts that serve a token; and a model takes what its layers take one by one."""
    bf16, tokens = PRESETS["bf16"], 1 << 20
    for values, share in ((NEMOTRON_8B, 1), (NANO_3, 6 / 128), (SUPER_3, 22 / 512)):
        config = ModelConfig.from_hf(values)
        active = sum(
            math.prod(shape) * (share if ".experts." in name else 1)
            for name, shape in parameter_shapes(config).items()
            if name.startswith("layers.")
        )
        found = learn(config, bf16, tokens, 1024)["linear"].bf16
        assert found == pytest.approx(6 * tokens * active, rel=0.01)
    for use in (decode, prefill, learn):
        whole, *apart = (use(_one_part(layers), bf16, 64, 900) for layers in ("MM-*E", *"MM-*E"))
        for kind in ("linear", "between", "attention"):
            for what in ("bf16", "bytes"):
                alone = sum(getattr(one[kind], what) for one in apart)
                assert getattr(whole[kind], what) == pytest.approx(alone)
                control = alone + getattr(apart[0][kind], what)
                assert control == 0 or getattr(whole[kind], what) != pytest.approx(control)
    mamba, mlp, attention = (decode(_one_part(one), bf16, 64, 900)["attention"] for one in "M-*")
    assert mlp.bytes == mlp.bf16 == 0
    assert mamba.bytes == 64 * 2 * 4 * 64 * 64 * 128, "a state is read and written"
    assert attention.bytes == 2 * 2 * 2 * 128 * 64 * (900 + 1), "keys and values are read"
    states = [largest_batch(_one_part(one), bf16, 900) for one in ("MM-*E", "MM-*E*", "M-*E")]
    assert states[1] < states[0] < states[2]


def test_fp8_wins_at_most_what_its_bytes_and_rate_allow() -> None:
    for config in SHAPES.values():
        for batch, context in ((1, 1024), (64, 8192), (512, 1024)):
            wide, weights, all_low = (
                floor(decode(config, PRESETS[p], batch, context), H200)
                for p in ("bf16", "fp8-rollout", "fp8")
            )
            assert 1 < wide / weights < wide / all_low < 2
    small = SHAPES["Qwen3-0.6B"]
    steps = [grpo_step(small, PRESETS[p], 512, 8, 512, 2048, 512)["learn"] for p in ("bf16", "fp8")]
    assert steps[0] / steps[1] < 1.45, "docs/gpu.md says that this target is out of reach"
    assert largest_batch(small, PRESETS["fp8"], 8192) > 1.8 * largest_batch(
        small, PRESETS["bf16"], 8192
    )


def _stage(
    folder: Path,
    name: str,
    rows: list[dict[str, object]],
    rehearsal: bool = False,
    gpu: str = "H100",
    broken: Sequence[str] = (),
) -> None:
    """As a session on that GPU would have written it."""
    session = f"{name} {rehearsal} {gpu}"
    begin = {
        "session": session,
        "machine": {"gpu": {"name": gpu}},
        "rehearsal": rehearsal,
        "source": "a",
    }
    check = {"session": session, "stage": "check", "case": "all"}
    check |= {"status": "failed" if broken else "done", "rows": [{"failures": broken}]}
    case = {"session": session, "stage": name, "case": "all", "status": "done", "rows": rows}
    with (folder / FILE).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (begin, check, case))


def _step(
    contestant: str, rollout: float, learn: float, peak: int, working: int
) -> dict[str, object]:
    values = {
        "rollout_s": rollout,
        "seconds": rollout + learn,
        "peak_bytes": {"rollout": 1, "learn": peak},
    }
    memory = {
        "working_bytes": working,
        "kv_bytes_per_token": working / 2,
        "kv_bytes": 10,
        "parameter_bytes": 5,
    }
    return {"case": "a", "contestant": contestant, "differing_tokens": 0.0, "sound": True, **values,
            **memory}  # fmt: skip


def test_targets_are_ratios_within_a_case(tmp_path: Path) -> None:
    assert all(target.measured == NOT_MEASURED for target in targets(tmp_path))
    assert table(tmp_path).count(NOT_MEASURED) == len(targets(tmp_path)) + 1
    contestants = [
        ("bf16, bitwise", 8.0, 4.0, 118, 8),
        ("fp8, bitwise", 4.0, 2.0, 84, 4),
        ("fp8, fast", 3.0, 2.0, 60, 4),
    ]
    steps = [_step(*contestant) for contestant in contestants]
    alone = {**_step("bf16, bitwise", 1.0, 1.0, 1, 1), "case": "without a partner"}
    proof = {"case": "a", "contestant": "log-probabilities", "recorded": 4, "sound": True}
    untimed = _step("bf16, bitwise", 8.0, 4.0, 118, 8)
    untimed = {key: value for key, value in untimed.items() if key != "seconds"}
    _stage(tmp_path, "grpo", [*steps, alone, proof, {**untimed, "case": "without its seconds"}])
    parts = (
        ("forward and backward", 3.0, 1.5),
        ("update and sync", 1.0, 0.5),
        ("prefill", 9.0, 1.0),
    )
    _stage(
        tmp_path,
        "learner",
        [
            {
                "case": f"a, 2 x 8 tokens, {part}",
                "contestant": f"{preset}, bitwise",
                "seconds": seconds,
            }
            for part, *both in parts
            for preset, seconds in zip(("bf16", "fp8"), both)
        ],
    )
    shares = [
        {"case": case, "contestant": "fp8", "share": share}
        for case, share in (("a", 0.5), ("b", 0.75))
    ]
    _stage(tmp_path, "decode", shares)
    _stage(
        tmp_path,
        "kernels",
        [{"case": "a o, 1 tokens", "contestant": "fp8 loses", "seconds": 3.0, "floor_s": 2.0}],
    )
    values = [target.values for target in targets(tmp_path)]
    # memory: of parts; of the peak, less 4 x 5 bytes of what is in float32 under any preset,
    # weights and cache
    assert values == [
        (0.0, 0.0, 0.0, 0.0),
        (2.0,),
        None,
        (2.0,),
        (2.0,),
        (1.2,),
        (4 / 3,),
        (0.5, 0.75),
        (0.5,),
        (0.5,),
        (0.625,),
    ]
    assert targets(tmp_path)[7].measured == "0.50 to 0.75 of it, 2 cases"
    assert "a o, 1 tokens: 1.50 × BF16's time" in table(tmp_path)
    assert "on one H100 |" in table(tmp_path)
    _stage(tmp_path, "decode", [], gpu="H200")
    assert targets(tmp_path)[1].measured == NOT_MEASURED, "what another GPU did is not beside it"


def test_a_small_rollout_is_apart_and_a_mixture_counts_its_experts(tmp_path: Path) -> None:
    """A rollout that launches bound is not the target's; a mixture's row that does not say how many
    experts its tokens chose is other work than the one beside it. A dense model's is as it was."""
    sides = [_step("bf16, bitwise", 6.0, 3.0, 118, 8), _step("fp8, bitwise", 4.0, 2.0, 84, 4)]
    _stage(tmp_path, "grpo", [{**side, "case": f"{LAUNCH_BOUND} of 256"} for side in sides])
    assert [target.values for target in targets(tmp_path)[1:3]] == [None, (1.5,)]
    mixture = "Qwen3-30B-A3B, batch 64, context 8192"
    row = {"contestant": "fp8", "share": 0.9, "seconds": 1.0, "tokens_per_s": 64.0}
    rows = [{**row, "case": mixture}, {**row, "case": "Qwen3-8B, batch 1", "share": 0.5}]
    _stage(tmp_path, "decode", rows)
    assert targets(tmp_path)[7].values == (0.5,)
    assert mixture not in decode_table(tmp_path)
    rows[0]["experts"] = [126, 127]
    _stage(tmp_path, "decode", rows)
    assert targets(tmp_path)[7].values == (0.9, 0.5)
    assert mixture in decode_table(tmp_path)


def test_a_random_cache_routes_as_evenly_as_real_ones() -> None:
    """Codes about zero; the control, codes of one sign, sends all tokens to the same experts."""
    experts = Experts(32, 4, 16)
    config = replace(SHAPES["Qwen3-30B-A3B"], num_layers=4, vocab_size=512, intermediate_size=32)
    config = replace(config, hidden_size=256, num_heads=4, num_kv_heads=2, experts=experts)
    model = random_model(config, "fp8", trained=False, backend="native")
    step = decode_step(model, batch=64, context=64)
    even = step.touched()
    for store in step.stores:
        for codes, scale in ((store.k, store.k_scale), (store.v, store.v_scale)):
            codes.random_(0, 0x70)
            assert scale is not None
            scale.fill_(1.0)
    one_sign = step.touched()
    assert len(even) == 4
    assert min(even[1:]) >= 30
    assert max(one_sign[1:]) < 24


@pytest.mark.slow
def test_the_targets_of_memory_are_possible() -> None:
    """What the plan counts for each part keeps its target; the former one, of the whole, did not
    hold."""
    for config in SHAPES.values():
        flows = [Described(config, PRESETS[name]) for name in ("fp8", "bf16")]
        working = [weight_bytes(flow).total for flow in flows]
        cache = [page_bytes(flow, 16) for flow in flows]
        sizes = [
            [learning_bytes(flow, tokens, Backward())[0] for tokens in (8192, 16384)]
            for flow in flows
        ]
        saved = [more - fewer for fewer, more in sizes]
        assert working[0] / working[1] <= 0.65
        assert cache[0] / cache[1] <= 0.55
        assert saved[0] / saved[1] <= 1.0, "both keep what cannot be made again"
        float32 = 16 * num_parameters(config)
        assert (float32 + working[0]) / (float32 + working[1]) > 0.65, "so no whole could be halved"


def test_a_rehearsal_measures_nothing(tmp_path: Path) -> None:
    _stage(
        tmp_path,
        "grpo",
        [_step("bf16, bitwise", 8.0, 4.0, 118, 8), _step("fp8, bitwise", 4.0, 2.0, 84, 4)],
        True,
    )
    assert all(target.measured == NOT_MEASURED for target in targets(tmp_path))
    _stage(
        tmp_path,
        "grpo",
        [_step("bf16, bitwise", 8.0, 4.0, 118, 8), _step("fp8, bitwise", 4.0, 2.0, 84, 4)],
    )
    assert targets(tmp_path)[1].values == (2.0,)


def test_figures_count_where_the_check_passed_and_something_was_computed(tmp_path: Path) -> None:
    """Kernels that do nothing return the same zeros to rollout and learner."""
    steps = [_step("bf16, bitwise", 8.0, 4.0, 118, 8), _step("fp8, bitwise", 4.0, 2.0, 84, 4)]
    _stage(tmp_path, "grpo", [{**step, "sound": False} for step in steps])
    _stage(tmp_path, "decode", [{"case": "a", "contestant": "fp8", "share": 0.5}], broken=["zeros"])
    assert all(target.measured == NOT_MEASURED for target in targets(tmp_path))
    _stage(tmp_path, "grpo", steps, gpu="H200")
    assert targets(tmp_path)[0].values == (0.0, 0.0)


def test_the_page_says_what_was_compared_and_reached(tmp_path: Path) -> None:
    assert bits_table(tmp_path).count(NOT_MEASURED) == 10
    assert ceilings_table(tmp_path).count(NOT_MEASURED) == 3
    _stage(tmp_path, "ceilings", [{"what": "copy", "rate": rate} for rate in (2.9e12, 3.05e12)])
    assert "| 3.05 TB/s |" in ceilings_table(tmp_path)
    claim = {
        "case": "tiles, fp8, x",
        "contestant": "N = 32",
        "compared": 4096,
        "differing": 1,
        "expected": "equal",
    }
    control = {
        **claim,
        "contestant": "changed",
        "differing": 9,
        "expected": "different",
        "holds": True,
    }
    beside = {"case": "cuBLAS against Triton", "contestant": "x", "compared": 200, "differing": 50}
    _stage(tmp_path, "bits", [{**claim, "holds": False}, control, beside])
    assert "| 4,096 | 1 | 1 of 1 |" in bits_table(tmp_path)
    assert "25.0% to 25.0% of elements" in bits_table(tmp_path)
