"""The tables of docs/gpu.md that say what a GPU reached, of results made up here."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import reached


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
