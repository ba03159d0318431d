"""The tables of docs/gpu.md: `python -m benchmarks.gpu.page` writes them there, so that no figure
is typed.

Floors come from the roofline; the kernels, and what was reached on a GPU, from
benchmarks/results/gpu.
"""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import attention_loop, layer_bytes, orientation, roofline
from benchmarks.gpu import reached, targets
from benchmarks.kernel_table import architecture_table, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu.md"
KERNELS = ROOT / "benchmarks" / "results" / "gpu" / "kernel_table.json"


def tables() -> dict[str, str]:
    """Every generated table in Markdown, by the name that marks its place."""
    kernels = json.loads(KERNELS.read_text(encoding="utf-8"))["kernels"]
    return {
        "kernels": table(kernels),
        "architectures": architecture_table(
            json.loads((KERNELS.parent / "architectures.json").read_text())
        ),
        "orientation": orientation.table(_kept("orientation")),
        "attention_loop": attention_loop.table(_kept("attention_loop")),
        "layer_bytes": layer_bytes.table(_kept("layer_bytes")),
        "targets": roofline.target_table(),
        "decoding": roofline.decode_table(),
        "ceilings": targets.ceilings_table(KERNELS.parent),
        "bits": targets.bits_table(KERNELS.parent),
        "reached": targets.table(KERNELS.parent),
        "decoded": reached.decode_table(KERNELS.parent),
        "graphs": reached.graphs_table(KERNELS.parent),
        "learned": reached.learning_table(KERNELS.parent),
        "profiled": reached.profile_table(KERNELS.parent),
        "products": reached.products_table(KERNELS.parent),
        "bandwidth": reached.bandwidth_table(KERNELS.parent),
    }


def _kept(name: str) -> Any:
    return json.loads((KERNELS.parent / f"{name}.json").read_text(encoding="utf-8"))


def filled(page: str) -> str:
    """The page with its tables as they are now."""
    for name, text in tables().items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(pattern, lambda m, t=text: f"{m[1]}\n{t}\n\n{m[2]}", page, flags=re.S)  # type: ignore[misc]
        assert count == 1, name
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
