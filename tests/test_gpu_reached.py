"""The tables of docs/gpu.md that say what a GPU reached, of results made up here."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import reached
from benchmarks.gpu.page import KERNELS, PAGE
from benchmarks.gpu.profile import by_kernel
from benchmarks.gpu.results import measured


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows by stage stand in for what sessions have measured."""
    names = ("bf16 cuBLAS", "bf16", "fp8 with its quantization", "fp8 cuBLAS")
    times = {1: (4.0, 3.0, 6.0, 12.0), 16: (1, 1, 1, 1), 64: (1, 2, 2, 1), 512: (2, 3, 4, 1)}
    times |= {8192: (8.0, 9.0, 4.0, 2.0)}
    products = [
        {"case": f"a o, {count} tokens", "contestant": name, "seconds": seconds}
        for count, each in times.items()
        for name, seconds in zip(names, each)
    ]
    step = "A, 4 layers, "
    rows = {
        "decode": [
            {"case": "A, batch 1", "contestant": "bf16", "seconds": 0.04, "tokens_per_s": 25.0},
            {"case": "A, batch 1", "contestant": "fp8", "seconds": 0.02, "tokens_per_s": 50.0,
             "share": 0.75},
            {"case": "A, batch 2", "contestant": "bf16", "seconds": 0.05, "tokens_per_s": 40.0},
        ],
        "kernels": [
            *products,
            {"case": "norm, 4 rows", "contestant": "norm", "bytes_per_s": 2e12, "share": 0.5},
        ],
        "profile": [
            {"case": f"{step}learning, fp8", "contestant": name, "seconds": seconds}
            for name, seconds in (
                ("all kernels", 9.0), ("_attend", 0.001), ("_attend", 0.002),
                ("nvjet_sm90_qqtst_1", 0.004), ("nvjet_sm90_tss_1", 0.008), ("_small", 1e-5),
                ("void at::native::add", 0.001), ("the others", 7.0),
            )
        ],
    }  # fmt: skip
    monkeypatch.setattr(reached, "measured", lambda given, stage: rows[stage])
    sides = [{"model": "A", "layers": 2, "sequences": 3, "tokens": 4}] * 2
    beside = {
        "forward_and_backward": [
            {**size, "precision": name, "ms": ms}
            for size, (name, ms) in zip(sides, (("bf16", 30.0), ("fp8", 20.0)))
        ],
        "decoding": [
            {"layers": 2, "batch": 8, "context": 1024, "precision": name, "triton_ms": own,
             "library_ms": library}
            for name, own, library in (("bf16", 8.0, 6.0), ("fp8", 4.0, 2.0))
        ],
    }  # fmt: skip
    (tmp_path / reached.BESIDE).write_text(json.dumps(beside))
    return tmp_path


def _rows(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_a_ratio_is_of_one_case(folder: Path) -> None:
    full, half = (line.split("|")[1:-1] for line in reached.decode_table(folder).splitlines()[2:])
    assert [cell.strip() for cell in full] == [
        "A, batch 1",
        "40.0",
        "",
        "20.0",
        "2.00",
        "50",
        "75%",
    ]
    assert [cell.strip() for cell in half] == ["A, batch 2", "50.0", "", "", "", "", ""]


def test_fp8_is_compared_with_the_best_product_of_bf16(folder: Path) -> None:
    """By Triton with its quantization, and by the library."""
    assert _rows(reached.products_table(folder)) == [
        ["a o", "0.50, 0.25", "1.00, 1.00", "0.50, 1.00", "0.50, 2.00", "2.00, 4.00"]
    ]


def test_kernels_of_a_step_are_added_by_what_they_are(folder: Path) -> None:
    """Sums of all kernels and of those that a case leaves out are not among them."""
    assert _rows(reached.profile_table(folder)) == [
        ["cuBLAS, BF16", "8.00"],
        ["cuBLAS, FP8", "4.00"],
        ["`attend`", "3.00"],
        ["PyTorch's: additions, copies, fills", "1.00"],
        ["the others", "0.01"],
        ["all", "**16.01**"],
    ]


def test_what_was_taken_by_hand(folder: Path) -> None:
    assert _rows(reached.learning_table(folder)) == [
        ["A, 2 layers, 3 x 4 tokens", "30", "20", "1.50"]
    ]
    assert _rows(reached.graphs_table(folder)) == [
        ["2 layers, batch 8, context 1,024", "8.00, 6.00", "4.00, 2.00", "2.00, 3.00"]
    ]
    assert _rows(reached.bandwidth_table(folder)) == [["norm, 4 rows", "2.00", "50%"]]


def test_a_trace_is_added_up_by_kernel_and_grid() -> None:
    """Copies and fills by name; not what the host did, nor marks without a duration."""
    events = [
        {"cat": "kernel", "name": "a", "dur": 2.0, "args": {"grid": [4, 1, 1]}},
        {"cat": "kernel", "name": "a", "dur": 3.0, "args": {"grid": [4, 1, 1]}},
        {"cat": "kernel", "name": "a", "dur": 5.0, "args": {"grid": [8, 1, 1]}},
        {"cat": "gpu_memcpy", "name": "copy", "dur": 1.0},
        {"cat": "cpu_op", "name": "a", "dur": 7.0},
        {"cat": "kernel", "name": "a"},
    ]
    found = by_kernel(events, "kernel")
    assert {key: count for key, (_, count) in found.items()} == {
        ("a", (4, 1, 1)): 2, ("a", (8, 1, 1)): 1, ("copy", ()): 1,
    }  # fmt: skip
    assert found["a", (4, 1, 1)][0] == pytest.approx(5e-6)


def test_the_prose_beside_the_tables_has_the_numbers_of_the_results() -> None:
    folder, text = KERNELS.parent, " ".join(PAGE.read_text(encoding="utf-8").split())
    claims = [row for row in measured(folder, "bits") if row.get("expected", "equal") == "equal"]
    claims = [row for row in claims if not row["case"].startswith("cuBLAS") and "compared" in row]
    assert sum(row["differing"] for row in claims) == 0
    assert f"of {sum(row['compared'] for row in claims) / 1e9:.1f} billion numbers" in text
    instruction = [row for row in claims if row["case"].startswith("the matrix instruction")]
    assert f"{sum(row['compared'] for row in instruction):,} numbers, of BF16" in text
    steps = [row for row in measured(folder, "grpo") if "recorded" in row]
    assert f"0 of {steps[0]['recorded']:,} under `fp8`, and under `bf16`" in text
    exact = {row["contestant"]: row for row in measured(folder, "grpo") if "rollout_s" in row}
    assert [exact[f"{name}, bitwise"]["differing_tokens"] for name in ("fp8", "bf16")] == [0, 0]
    runs = json.loads((folder / reached.BESIDE).read_text(encoding="utf-8"))["runs"]
    for sentence in (
        f"{runs['quickstart_differing']} of {runs['quickstart_tokens']:,} tokens differ",
        f"{runs['tests_passed']} passed and {runs['tests_failed']} failed",
        f"{runs['tests_again']} were run again",
    ):
        assert sentence in text, sentence
