"""The operators on 64-bit ARM, under an emulator: the bits of this processor. It needs a cross
compiler and QEMU (Debian: g++-aarch64-linux-gnu, qemu-user)."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isobit.kernels.native import available
from isobit.kernels.native.build import library
from isobit.kernels.native.recipe import FLAGS, HERE, SOURCES, compiler

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROGRAM = Path(__file__).with_name("digests.cpp")
WRONG = ("-ffp-contract=fast",)
"""What lets a compiler multiply and add in one rounding where the definition has two."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}"),
    pytest.mark.skipif(
        not (shutil.which(CROSS) and shutil.which(EMULATOR)), reason=f"no {CROSS} or no {EMULATOR}"
    ),
]


def digests(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def compiled(folder: Path, source: Path, *flags: str) -> str:
    """The object file of ARM's compiler."""
    target = folder / f"{source.stem}{len(flags)}.o"
    warnings = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Werror")
    command = [
        CROSS,
        *FLAGS,
        *warnings,
        f"-I{HERE}",
        *flags,
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True, timeout=300)
    return str(target)


def on_arm(folder: Path, objects: list[str]) -> list[str]:
    program = str(folder / "digests")
    subprocess.run(
        [CROSS, "-static", *objects, "-o", program],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return digests(EMULATOR, program)


def test_an_arm_processor_computes_the_same_bits(tmp_path: Path) -> None:
    here = str(tmp_path / "here")
    linked = [library()._name, f"-Wl,-rpath,{Path(library()._name).parent}", "-o", here]
    subprocess.run(
        [compiler(), *FLAGS, f"-I{HERE}", str(PROGRAM), *linked],
        check=True,
        timeout=300,
    )
    *wanted, path = digests(here)
    names = sorted({*SOURCES} - {"native/interface.cpp"})
    with ThreadPoolExecutor(2) as pool:
        objects = dict(zip(names, pool.map(lambda name: compiled(tmp_path, HERE / name), names)))
    main = compiled(tmp_path, PROGRAM)
    *found, arm_path = on_arm(tmp_path, [main, *objects.values()])
    assert found == wanted
    assert len(found) == 50
    assert arm_path == "path 1" != path, "products by NEON"
    for name in ("norms/norms.cpp", "attention/attention_backward.cpp"):  # the control
        objects[name] = compiled(tmp_path, HERE / name, *WRONG)
    *other, _ = on_arm(tmp_path, [main, *objects.values()])
    differing = {line.split()[0] for line, right in zip(other, wanted) if line != right}
    assert differing, "a compiler that contracts is noticed"
    assert "bf16" not in differing, "the rest is as it was"
