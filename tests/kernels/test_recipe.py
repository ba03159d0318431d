"""How the native library is compiled: warnings are errors for the tests and nothing to users; and
which of a wheel's libraries a processor gets."""

import errno
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from isobit.kernels.native import build, recipe
from isobit.kernels.native.recipe import (
    HEADERS,
    HERE,
    LEVELS,
    SOURCES,
    WARNINGS,
    BuildFailed,
    compile_library,
)
from tests.kernels.libraries import write

COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]
NONE = pytest.mark.skipif(not COMPILERS, reason="no C++ compiler")


def test_the_recipe_names_every_file() -> None:
    found = {str(path.relative_to(HERE)) for path in (*HERE.rglob("*.cpp"), *HERE.rglob("*.h"))}
    assert found == {*SOURCES, *HEADERS}


@NONE
@pytest.mark.parametrize("program", COMPILERS)
def test_a_warning_is_an_error_here_and_no_hindrance_to_a_user(
    program: str, tmp_path: Path
) -> None:
    """Every source but one is empty, and that one compares signed with unsigned numbers. That all
    files compile without a warning: `test_native_invariance.py`, which builds with `WARNINGS`, and
    below."""
    for name in (*SOURCES, *HEADERS):
        write(tmp_path / name, "")
    (tmp_path / SOURCES[0]).write_text("bool less(int a, unsigned b) { return a < b; }\n")
    library = tmp_path / "library.so"
    compile_library(program, library, [], [], tmp_path)
    assert library.is_file()
    library.unlink()
    with pytest.raises(BuildFailed, match=r"failed \(exit 1\): .*sign-compare"):
        compile_library(program, library, [], [], tmp_path, WARNINGS)
    assert not library.exists()


@pytest.mark.slow
@pytest.mark.skipif("clang++" not in COMPILERS, reason="clang++ is not here")
def test_clang_has_no_warnings(tmp_path: Path) -> None:
    compile_library(
        str(shutil.which("clang++")), tmp_path / "library.so", ["-O0"], [], everywhere=WARNINGS
    )


@NONE
def test_a_user_is_told_that_it_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and by the first rank. The sources are empty."""
    (sources := tmp_path / "sources").mkdir()
    for name in (*SOURCES, *HEADERS):
        write(sources / name, "")
    program = str(shutil.which(COMPILERS[0]))
    said = []
    for place, rank in (("a", "0"), ("a", "0"), ("b", "1")):
        (tmp_path / place).mkdir(exist_ok=True)
        monkeypatch.setenv("RANK", rank)
        assert build.compiled(program, tmp_path / place, sources).is_file()
        said.append(capsys.readouterr().err)
    line = r"isobit: compiling the operators for this processor \(once, about \d+ s\)\n"
    assert re.fullmatch(line, said[0])
    assert said[1:] == ["", ""]


def test_old_libraries_are_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    """When one is built. The newest four by use stay, and what was loaded within a day; so do files
    of others."""
    now, day = time.time(), 24 * 3600
    for number in range(12):
        for name in (f"isobit-{number}.so", f"isobit-{number}.cpu.rows32.passed"):
            (tmp_path / name).touch()
        used = now - day * (0.5 if number < 6 else 2 + number)
        os.utime(tmp_path / f"isobit-{number}.so", (used, used))
    for name, age in (("build-old", 2 * day), ("build-new", 60), ("other", 9 * day)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.o").touch()
        os.utime(tmp_path / name, (now - age, now - age))
    build.clear_old(tmp_path)
    found = {path.name for path in tmp_path.iterdir()}
    kept = {f"isobit-{n}{end}" for n in range(6) for end in (".so", ".cpu.rows32.passed")}
    assert found == {*kept, "build-new", "other"}
    for number in range(6):
        os.utime(tmp_path / f"isobit-{number}.so", (now - day * (9 - number),) * 2)
    build.clear_old(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.so")) == [
        f"isobit-{number}.so" for number in (2, 3, 4, 5)
    ]


@NONE
def test_a_library_that_another_process_removes_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment when it is found and the one when it is loaded. The control: one that is
    there and cannot be loaded is not compiled again and again."""
    made: list[Path] = []

    def compile_(program: str, path: Path, *_: object) -> None:
        made.append(path)
        path.touch()

    def load(path: Path) -> str:
        if len(made) == 1:
            path.unlink()
            raise BuildFailed("gone")
        return "loaded"

    monkeypatch.setattr(build, "compile_library", compile_)
    monkeypatch.setattr(build, "load", load)
    program = str(shutil.which(COMPILERS[0]))
    assert str(build._loaded(program, tmp_path)) == "loaded"
    assert len(made) == 2
    os.utime(made[0], (0, 0))
    build._loaded(program, tmp_path)
    assert made[0].stat().st_mtime > time.time() - 600  # it counts as used now

    def broken(path: Path) -> str:
        raise BuildFailed("broken")

    monkeypatch.setattr(build, "load", broken)
    with pytest.raises(BuildFailed, match="broken"):
        build._loaded(program, tmp_path)
    assert len(made) == 2


def test_a_compiler_that_takes_too_long_is_told_with_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "c++"
    program.write_text("#!/bin/sh\n[ $1 = --version ] && echo 1 && exit\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(recipe, "_TIMEOUT_S", 0.1)
    with pytest.raises(BuildFailed, match=r"took longer than 0\.1 s"):
        build.compiled(str(program), tmp_path)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("isobit: compiling the operators")
    assert second == (
        f"isobit: the operators were not compiled: {program} took longer than 0.1 s; without them "
        "PyTorch computes, many times as slowly; the next start tries again"
    )
    assert not list(tmp_path.glob("*.so"))


def test_a_processor_gets_the_best_library_that_it_can_run(tmp_path: Path) -> None:
    """By its features; none where a library was made of other sources, or the features are too
    few."""
    for level in LEVELS:
        recipe.prebuilt(level, tmp_path).touch()
    best, other = LEVELS
    all_features = frozenset(LEVELS[best])
    for features, level in (
        (all_features, best),
        (all_features | {"amx_tile"}, best),
        (all_features - {"avx512vl"}, other),
        (frozenset(LEVELS[other]), other),
        (all_features - {"fma"}, None),
        (frozenset(), None),
    ):
        found = build.prebuilt_here(features, tmp_path)
        assert found == (None if level is None else (level, recipe.prebuilt(level, tmp_path)))
    recipe.prebuilt(best, tmp_path).rename(tmp_path / f"{best}-{'0' * 24}.so")
    assert build.prebuilt_here(all_features, tmp_path) == (other, recipe.prebuilt(other, tmp_path))


def test_the_fingerprint_is_of_every_file(tmp_path: Path) -> None:
    for name in (*SOURCES, *HEADERS):
        write(tmp_path / name, (HERE / name).read_text())
    assert recipe.digest("flag", sources=tmp_path) == recipe.digest("flag")
    assert recipe.digest("flags", sources=tmp_path) != recipe.digest("flag")
    for name in (*SOURCES, *HEADERS):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "\n")
        assert recipe.digest("flag", sources=tmp_path) != recipe.digest("flag")
        (tmp_path / name).write_text(text)


_COMPILER = """#!/bin/sh
for last; do :; done
case " $* " in *" --version "*) echo fake; exit;; esac
mkdir -p {log}/now && touch {log}/now/$$ && ls {log}/now | wc -l >> {log}/most
sleep 0.05
rm {log}/now/$$
case " $* " in *" -shared "*) echo linked >> {log}/linked;; esac
touch "$last"
"""


@pytest.mark.slow
def test_two_processes_compile_once_and_a_compiler_for_each_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock is a file's, so threads stand for processes. The control has no lock."""
    program, place = tmp_path / "c++", tmp_path / "place"
    program.write_text(_COMPILER.format(log=tmp_path))
    program.chmod(0o755)
    place.mkdir()
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    linked = tmp_path / "linked"

    def compiled_twice() -> int:
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(build.compiled, str(program), place) for _ in range(2)]
            for path in {one.result() for one in made}:
                path.unlink()
        return len(linked.read_text().split())

    assert compiled_twice() == 1
    assert max(map(int, (tmp_path / "most").read_text().split())) == 3
    linked.unlink()
    monkeypatch.setattr(build, "alone", lambda *_: nullcontext())
    assert compiled_twice() == 2


@NONE
def test_where_a_file_system_has_no_locks_each_process_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: another error of the lock is one line."""
    for code, works in ((errno.ENOLCK, True), (errno.EACCES, False)):

        def refuses(lock: Path, waits: object, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(build, "alone", refuses)
        monkeypatch.setattr(build, "compile_library", lambda program, path, *_: path.touch())
        (place := tmp_path / str(code)).mkdir()
        program = str(shutil.which(COMPILERS[0]))
        if works:
            assert build.compiled(program, place).is_file()
        else:
            with pytest.raises(BuildFailed, match=r"cannot write to .*: Permission denied"):
                build.compiled(program, place)


def test_where_one_file_fails_no_compiler_goes_on(tmp_path: Path) -> None:
    """Else it would write into a folder that is gone."""
    program = tmp_path / "c++"
    program.write_text(
        f"#!/bin/sh\ncase $* in *{SOURCES[0]}*) echo 'error: no' >&2; exit 1;; esac\n"
        f"touch {tmp_path}/began.$$; sleep 30; touch {tmp_path}/ended\n"
    )
    program.chmod(0o755)
    with pytest.raises(BuildFailed, match="error: no"):
        compile_library(str(program), tmp_path / "library.so", [], [])
    assert not list(tmp_path.glob("build-*"))
    assert not (tmp_path / "ended").exists()
