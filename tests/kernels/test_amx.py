"""AMX's products on a processor that has no AMX: its file, compiled as it is, over tiles in plain
C++ (`amx.h`). That they add as TDPBF16PS does was found where there is AMX, by `test_ordered.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.kernels.product.ordered_native import ISAS, ORDERS, TDP32
from tests.kernels.libraries import EMULATED_AMX, PRODUCTS, TILES, library_of

ROOT = TILES.parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EMULATED_AMX, reason="this processor has no AVX-512 with VBMI"),
]


def test_its_products_have_the_bits_of_every_instruction_set(tmp_path: Path) -> None:
    """The tests of ordered products, of nibbles and of adapters, with the emulated set among those
    of this machine."""
    tests = [f"tests/kernels/test_{name}.py" for name in ("ordered", "packed_fp4", "low_rank")]
    given = {"ISOBIT_CACHE": str(tmp_path), "ISOBIT_CXXFLAGS": " ".join(EMULATED_AMX)}
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-m", "not slow"]  # one has its own library
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    passed = [line for line in done.stdout.splitlines() if line.startswith("PASSED")]
    assert sum("-amx" in line or "[amx" in line for line in passed) > 10


@pytest.mark.parametrize("wrong", [False, True])
def test_the_self_test_sees_tiles_that_add_otherwise(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control adds each chain to the sum by itself."""
    text = TILES.read_text()
    right = "_mm512_add_ps(_mm512_loadu_ps(c), _mm512_add_ps(chain[0], chain[1]))"
    assert text.count(right) == 1
    other = "_mm512_add_ps(_mm512_add_ps(_mm512_loadu_ps(c), chain[0]), chain[1])"
    header = tmp_path / "tiles.h"
    header.write_text(text.replace(right, other) if wrong else text)
    library = library_of(PRODUCTS, tmp_path, f"-O1 -include {header}", monkeypatch)
    found = library.isobit_ordered_self_test(ISAS.index("amx"), ORDERS.index(TDP32))
    assert (found > 0) == wrong
