"""The outside of the cage (`jail.py`): what a program may take, one call that runs it, and whether
there is a cage.

Left out: what the outcome is worth (`named/code.py`).
"""

import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isobit.errors import IsobitError
from isobit.tasks.rewards.sandbox.seccomp import filter_for

_HERE = Path(__file__).resolve().parent
_SOURCE = _HERE.parents[3]
_JAIL = "import sys; sys.path.append(sys.argv[1]); from isobit.tasks.rewards.sandbox import jail; jail.main()"
_GRACE_S = 10.0  # for setting up and for the end, beyond the programs' own time
_MIB = 1 << 20
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Limits:
    """The limits of one sample's program: seconds over all its runs, and for each process MiB of
    address space, MiB of files, processes (threads count), open files and bytes of output."""

    timeout_s: float
    memory_mib: int
    disk_mib: int
    processes: int
    open_files: int = 64
    output_bytes: int = _MIB


@dataclass(frozen=True)
class Outcome:
    """The end of one run: its exit code (negative: a signal; None: killed here, being `late` or
    printing too `long`), and what it printed."""

    status: int | None
    late: bool
    long: bool
    output: str


def run_caged(
    files: Mapping[str, str],
    main: str,
    inputs: Sequence[str],
    limits: Limits,
    isolation: str,
    packages: bool = False,
    companion: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run the file `main` once for each text on stdin; outcomes in order, fewer of them when the
    time is out or a program broke the cage.

    `packages`: the program may also import what is installed for this Python. `companion`: files of
    a second cage, whose first file runs at the same time until the program ends; each of the two
    gets the numbers of two pipes to the other, to read and to write, as its arguments. Raises
    IsobitError if the cage cannot be made; no program has been run then.
    """
    # without isolation a program may leave what cannot be removed
    with tempfile.TemporaryDirectory(
        prefix="isobit-code-", ignore_cleanup_errors=True
    ) as directory:
        os.chmod(directory, 0o755)  # the user inside may be another
        package_paths = _packages() if packages else []
        cages = [{"files": dict(files), "main": main, "inputs": list(inputs)}]
        if companion:
            cages.append({"files": dict(companion), "main": next(iter(companion)), "inputs": [""]})
        code = filter_for(platform.machine())
        job = {
            "isolation": isolation,
            "directory": directory,
            "cages": cages,
            "filter": code.hex() if code else None,
            "python": _python(),
            "paths": [*_python_paths(), *package_paths],
            "environment": _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(package_paths)},
            "timeout_s": limits.timeout_s,
            "disk_bytes": limits.disk_mib * _MIB,
            "output_bytes": limits.output_bytes,
            "limits": _of_each_process(limits),
        }
        if isolation == "none":
            for name, text in {**files, **(companion or {})}.items():
                Path(directory, name).write_text(text, encoding="utf-8", errors="surrogatepass")
        return _jail(json.dumps(job).encode(), len(cages), limits.timeout_s + _GRACE_S)


def _of_each_process(limits: Limits) -> dict[str, int]:
    """Return the limits of each process, by the names of `resource.RLIMIT_`."""
    limits_by_name = {"CORE": 0, "CPU": int(limits.timeout_s) + 1, "NOFILE": limits.open_files}
    limits_by_name |= {"FSIZE": limits.disk_mib * _MIB, "AS": limits.memory_mib * _MIB}
    return limits_by_name | {"NPROC": limits.processes + 2}  # the two processes above it count too


def check_cage(isolation: str, packages: bool) -> None:
    """Raise IsobitError, saying what is missing and which option accepts less, unless a program
    runs in the cage."""
    if isolation == "namespaces" and sys.platform != "linux":
        missing = "namespaces are Linux's"
    else:
        try:
            program, limits = {"program.py": "print(6 * 7)"}, Limits(30, 512, 16, 8)
            outcomes = run_caged(program, "program.py", [""], limits, isolation, packages)
        except IsobitError as error:
            missing = str(error)
        else:
            if outcomes and outcomes[0].status == 0 and outcomes[0].output == "42\n":
                return
            missing = f"Python does not run in it ({outcomes[0] if outcomes else 'no answer'})"
    if isolation == "none":
        raise IsobitError(f"reward code: programs cannot be run: {missing}")
    raise IsobitError(
        f"reward code: this machine cannot isolate programs: {missing}; allow unprivileged user "
        "namespaces (in a container: its seccomp profile), or accept programs that reach network "
        "and files with options.isolation: none"
    )


def _jail(job: bytes, cages: int, timeout_s: float) -> list[Outcome]:
    """Run the jail on a job and return the outcomes that it reports. Raises IsobitError unless all
    cages came to run their programs; a program that breaks its cage after that loses its
    outcomes."""
    command = [sys.executable, "-I", "-S", "-B", "-c", _JAIL, str(_SOURCE)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}
    ) as process:
        try:
            reported, errors = process.communicate(job, timeout=timeout_s)
        except (
            subprocess.TimeoutExpired
        ):  # it keeps the time itself; its death is that of all in it
            process.kill()
            reported, errors = process.communicate()
    replies = [
        json.loads(line) for line in reported.splitlines(keepends=True) if line.endswith(b"\n")
    ]
    if sum("started" in reply for reply in replies) < cages:
        last = errors.decode(errors="replace").strip().splitlines()
        reasons = [reply["error"] for reply in replies if "error" in reply]
        raise IsobitError(
            *(
                reasons[:1]
                or [f"no program could be started: {last[-1] if last else 'no reason given'}"]
            )
        )
    return [Outcome(**reply) for reply in replies if "status" in reply]


def side(name: str, **more: str) -> dict[str, str]:
    """Return the files of one of two cages: a script of this package, `wire.py`, and others by
    their stem."""
    texts = {file: (_HERE / f"{file}.py").read_text(encoding="utf-8") for file in (name, "wire")}
    texts[name] = texts[name].replace(
        "from isobit.tasks.rewards.sandbox import wire", "import wire"
    )
    return {f"{file}.py": text for file, text in {**texts, **more}.items()}


def _python() -> str:
    """Return the path of the interpreter itself, past the links of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _python_paths() -> list[str]:
    """Return the directories that the interpreter needs, outermost first; none of a virtual
    environment."""
    base = {"platbase": sys.base_exec_prefix, "installed_platbase": sys.base_exec_prefix}
    paths = {sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")}
    paths |= {os.path.dirname(_python()), os.path.join(os.path.realpath(sys.base_prefix), "lib")}
    return sorted({os.path.realpath(path) for path in paths})


def _packages() -> list[str]:
    return [
        path
        for path in sys.path
        if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)
    ]
