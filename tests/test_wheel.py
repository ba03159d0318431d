"""The wheel: built from a source distribution and installed where there is no compiler, it computes
in C++, with the bits of the library that is compiled for this processor alone."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from isobit.kernels.native import available
from isobit.kernels.native.recipe import LEVELS
from tests.documents import ROOT
from tests.once import once
from tests.strange_user import COMMANDS, folder_of_their_own, run_as
from tests.test_no_home import all_commands, prepared

HERE = (platform.system(), platform.machine()) == ("Linux", "x86_64") and available()[0]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HERE, reason="wheels carry libraries for Linux on x86-64"),
]

OPERATORS = """
import hashlib, json, sys, torch, isobit
from isobit.kernels import KVStore, Layout, get_ops
from isobit.precision import BF16, E4M3, QuantSpec

def digest(*tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

ops = get_ops("auto", sys.argv[1])
random = torch.Generator().manual_seed(3)
x, w = torch.randn(33, 512, generator=random), torch.randn(72, 512, generator=random)
a, layout = ops.quantize(x, QuantSpec(E4M3, "1x128")), Layout.packed([20, 13])
q = x.view(33, 8, 64).bfloat16()
store = KVStore.allocate(48, 2, 64, QuantSpec(E4M3, "row"), BF16)
ops.kv_write(store, q[:, :2], q[:, 2:4], layout)
print(json.dumps({
    "package": isobit.__file__, "why": ops.why,
    "codes": digest(a.data, a.scale),
    "fp8": digest(ops.product(a, ops.quantize(w, QuantSpec(E4M3, "128x128")))),
    "bf16": digest(ops.product(x.bfloat16(), w.bfloat16(), None, torch.float32)),
    "fp32": digest(ops.product(x, w, None, torch.float32)),
    "attention": digest(*ops.attention(q, store, layout, 0.1)),
    "silu": digest(ops.gate_mul("silu", x)), "norm": digest(ops.rms_norm(x, x[0], 1e-5)[0]),
    "logprobs": digest(*ops.token_logprobs(x, torch.arange(33), 1.0)),
    "tokens": digest(ops.sample(x, torch.arange(132).view(33, 4), 1.0)),
}))
"""


def ran(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CXX", "PYTHONPATH", "ISOBIT_CXXFLAGS")
    }
    return subprocess.run(
        command, cwd=folder, env=kept | variables, capture_output=True, text=True, check=False
    )


def computed(
    packages: Path, folder: Path, consistency: str = "bitwise", **variables: str
) -> Mapping[str, str]:
    """What the operators of the package in `packages` return."""
    variables |= {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    done = ran([sys.executable, "-c", OPERATORS, consistency], folder, **variables)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    assert found.pop("package").startswith(str(packages))
    return found


def sources(folder: Path) -> Path:
    """What a distribution is made of, so that nothing is built in the checkout."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copytree(
        ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    return folder


def hook(name: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call the build backend as pip does; what it makes is in `dist`."""
    call = f"from setuptools import build_meta; build_meta.{name}('dist')"
    return ran([sys.executable, "-c", call], folder, **variables)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as `python -m build` makes it, once for all workers: of the source distribution. Without
    that program, pip takes its place."""
    return next((once(tmp_path_factory, "wheel", make_wheel) / "dist").glob("*.whl"))


def make_wheel(folder: Path) -> None:
    sources(folder)
    build = find_spec("build")
    if build is not None and build.origin is not None:
        done = ran([sys.executable, "-m", "build", "--no-isolation"], folder, ISOBIT_PREBUILT="1")
    else:
        assert hook("build_sdist", folder).returncode == 0
        pip = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-build-isolation",
            "--no-deps",
            "--no-index",
            "--no-cache-dir",
        ]
        distribution = next((folder / "dist").glob("*.tar.gz"))
        done = ran([*pip, "--wheel-dir", "dist", str(distribution)], folder, ISOBIT_PREBUILT="1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        "packages",
    ]
    done = ran([*pip, str(wheel)], folder)
    assert done.returncode == 0, done.stderr
    return folder / "packages"


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment without any program, and with an empty cache."""
    (tmp_path / "nothing").mkdir()
    return {"PATH": str(tmp_path / "nothing"), "ISOBIT_CACHE": str(tmp_path / "cache")}


def libraries(packages: Path) -> dict[str, Path]:
    """The compiled library of each level."""
    found = (packages / "isobit/kernels/native/prebuilt").glob("*.so")
    return {path.name[: len("x86-64-v4")]: path for path in found}


def test_the_wheel_is_of_a_platform_and_of_every_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        described = archive.read(
            next(name for name in names if name.endswith(".dist-info/WHEEL"))
        ).decode()
    assert not [name for name in names if ".data/" in name]
    assert {"Root-Is-Purelib: false", "Tag: py3-none-linux_x86_64"} <= set(described.splitlines())
    assert {f"isobit/kernels/native/prebuilt/{level}-" for level in LEVELS} == {
        name.rpartition("-")[0] + "-" for name in names if name.endswith(".so")
    }
    assert {
        "isobit/kernels/product/product.cpp",
        "isobit/kernels/native/tile.h",
        "isobit/py.typed",
        "isobit/configs/quickstart.yaml",
        "isobit/configs/quickstart-sft.yaml",
    } <= set(names)


def test_the_libraries_need_the_c_library_only(installed: Path) -> None:
    """No C++ runtime of a certain age, nor OpenMP. The control: the same question of PyTorch's."""

    def needed(path: Path) -> bool:
        data = path.read_bytes()
        return b"libstdc++.so" in data or b"libgcc_s.so" in data or b"libgomp" in data

    assert len(libraries(installed)) == len(LEVELS)
    assert not any(needed(path) for path in libraries(installed).values())
    torch = Path(str(find_spec("torch").origin)).parent  # type: ignore[union-attr]
    assert needed(torch / "lib" / "libtorch_cpu.so")


def test_without_a_compiler_the_wheel_computes_in_cpp_with_the_bits_of_a_compiled_library(
    installed: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    """By the best library, with other instruction sets, and by the library of each level; compared
    with the checkout's, compiled for this processor. The controls: other sums have other bits, and
    without libraries nothing is native."""
    here = dict(computed(ROOT / "src", tmp_path))
    assert here.pop("why").startswith("native backend: compiled by ")
    for changed in ({}, {"ISOBIT_ISA": "avx2"}, {"ISOBIT_ISA": "portable"}):
        found = dict(computed(installed, tmp_path, **bare, **changed))
        assert found.pop("why").startswith("native backend: prebuilt for x86-64-v")
        assert found == here
    assert computed(installed, tmp_path, "exact", **bare)["bf16"] != here["bf16"]
    copy, used = tmp_path / "copy", []
    shutil.copytree(installed, copy)
    for level in LEVELS:
        found = dict(computed(copy, tmp_path, **bare))
        used.append(found.pop("why"))
        assert found == here
        libraries(copy)[level].unlink()
    assert used[-1].startswith("native backend: prebuilt for x86-64-v3")
    without = computed(copy, tmp_path, **bare)
    assert without["why"].startswith(
        "reference backend, because native cannot be built: no C++ compiler found"
    )
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_library_of_other_sources_or_that_cannot_be_loaded_is_not_used(
    installed: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(installed, copy)
    for path in libraries(copy).values():
        path.write_text("nothing")
    assert (
        "no C++ compiler found (g++, c++, clang++); cannot load "
        in computed(copy, tmp_path, **bare)["why"]
    )
    shutil.rmtree(copy)
    shutil.copytree(installed, copy)
    source = copy / "isobit/kernels/product/product.cpp"
    source.write_text(source.read_text() + "\n")
    without = computed(copy, tmp_path, **bare)["why"]
    assert "no C++ compiler found (g++, c++, clang++)" in without
    assert "cannot load" not in without
    assert "CXX=none is not a program" in computed(installed, tmp_path, **bare, CXX="none")["why"]


def test_the_source_distribution_has_what_the_repository_has(tmp_path: Path) -> None:
    """All tests with their helpers, configs, examples, documents and the Makefile, and nothing
    else."""
    listed = ran(["git", "ls-files", "-z"], ROOT)
    if listed.returncode != 0:
        pytest.skip("not a checkout")
    files = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "__pycache__").mkdir()
    (tmp_path / "tests" / "__pycache__" / "old.cpython-311.pyc").touch()
    assert hook("build_sdist", tmp_path).returncode == 0
    (made,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(made) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert files - found == set()
    more = found - files
    assert {name for name in more if ".egg-info/" not in name} == {"PKG-INFO", "setup.cfg"}


def test_a_module_that_is_gone_is_not_in_the_next_wheel(tmp_path: Path) -> None:
    """As `pip install .` builds it, twice in one folder. The control: it was in the first one."""
    sources(tmp_path)
    gone = tmp_path / "src" / "isobit" / "gone.py"
    gone.touch()
    for has in (True, False):
        assert hook("build_wheel", tmp_path, ISOBIT_PREBUILT="0").returncode == 0
        (made,) = (tmp_path / "dist").glob("*.whl")
        with zipfile.ZipFile(made) as archive:
            assert ("isobit/gone.py" in archive.namelist()) == has
            assert "isobit/errors.py" in archive.namelist()
        made.unlink()
        gone.unlink(missing_ok=True)


@pytest.mark.parametrize("home", [None, "/"], ids=["no HOME", "HOME=/"])
def test_every_command_works_without_a_home(installed: Path, home: str | None) -> None:
    """For another user than the one who installed it, in C++, without a word about a cache; also
    where not even a temporary directory can be written. The control: without the libraries there is
    a line, and no traceback."""
    with folder_of_their_own() as folder:
        prepared(folder)
        packages = folder / "packages"
        shutil.copytree(installed, packages)
        words = ["-c", COMMANDS, json.dumps(all_commands())]
        done = run_as(words, folder, packages, home)
        ended = [line for line in done.stdout.splitlines() if ": exit " in line]
        assert ended == [f"{command[0]}: exit 0" for command in all_commands()], done.stderr
        assert not {"Traceback", "compil", "cache"} & set(
            re.findall(r"Traceback|compil|cache", done.stderr)
        )
        script = "from isobit.kernels import get_ops; print(get_ops('auto', 'bitwise').why)"
        nowhere = {"TMPDIR": "/nonexistent", "ISOBIT_CACHE": "/nonexistent/cache"}
        done = run_as(["-c", script], folder, packages, home, **nowhere)
        assert (done.returncode, done.stderr) == (0, "")
        assert "native backend: prebuilt for x86-64" in done.stdout
        shutil.rmtree(packages / "isobit" / "kernels" / "native" / "prebuilt")
        done = run_as(["-c", script], folder, packages, home, **nowhere)
        assert (done.returncode, len(done.stderr.splitlines())) == (0, 1)
        assert "cannot make the cache folder /nonexistent/cache/native: Permission" in done.stderr


def test_other_installations_are_pure(tmp_path: Path) -> None:
    """Without a compiler, where none is wanted, and an editable one; where one is demanded, its
    absence is an error."""
    for name, variables in (
        ("build_wheel", {"CXX": "none"}),
        ("build_wheel", {"ISOBIT_PREBUILT": "0"}),
        ("build_editable", {}),
    ):
        folder = tmp_path / f"{name}{len(variables)}{'CXX' in variables}"
        folder.mkdir()
        done = hook(name, sources(folder), **variables)
        assert done.returncode == 0, done.stderr
        assert (
            "compiled on first use: CXX=none is not a program" in done.stdout + done.stderr
        ) == ("CXX" in variables)
        (made,) = (folder / "dist").glob("*.whl")
        assert made.name.endswith("-none-any.whl")
        with zipfile.ZipFile(made) as archive:
            assert not [file for file in archive.namelist() if file.endswith(".so")]
    folder = tmp_path / "demanded"
    folder.mkdir()
    done = hook("build_wheel", sources(folder), CXX="none", ISOBIT_PREBUILT="1")
    assert done.returncode == 1
    assert "ISOBIT_PREBUILT=1: CXX=none is not a program" in done.stderr
