"""What the stages find, in one file: a line of JSON for every case, written when the case ends.

So a run that is cut off loses one case, and the next one goes on with what is left. A case is
`done`, `failed` (with the error; its other rows stand), `missing` (with the reason: time, memory, a
tool that is not there), or `cut` off with its process. Those that are done or failed are not run
again on the same machine with the same code; the last line of a case counts. What is the same code
is a matter of the rooms that a stage runs, and of what they compute: an edited comment restarts
nothing. Everything is in one file because a machine that is lent may give back only a few.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from isobit.kernels.gpu import find_gpu, versions
from isobit.run.source import code_digest

FILE = "results.jsonl"
ENDED = ("done", "failed")
SOURCE = Path(__file__).resolve().parents[2] / "src" / "isobit"
CHECK = "check"
"""The stage that every session begins with: figures count where it has passed."""
ROOMS = ("precision", "kernels", "model", "engine", "rl")
_RUN = {
    "ceilings": (),
    CHECK: ROOMS[:2],
    "kernels": ROOMS[:2],
    "compiling": ROOMS[:3],
    "decode": ROOMS[:3],
    "sanitizer": ROOMS[:3],
    "bits": ROOMS[:4],
}
"""The rooms that decide what a stage finds; those that are not here run all."""

Line = dict[str, Any]


def gpu_machine() -> dict[str, object]:
    """The machine, the GPU, and the versions that can change a bit."""
    gpu = find_gpu()
    name = (
        None
        if gpu is None
        else {"name": gpu.name, "architecture": gpu.architecture, "memory": gpu.memory}
    )
    return machine() | versions() | {"gpu": name}


def digests() -> dict[str, str]:
    """Of what each room computes: they name the code also where the tree has no repository around
    it."""
    return {room: code_digest(SOURCE / room)[:16] for room in ROOMS}


@dataclass(frozen=True)
class Results:
    """The file of one folder, and the session that writes to it: one command, whatever processes it
    starts."""

    folder: Path
    session: str
    rehearsal: bool = False
    retry: bool = False  # what failed in an earlier session

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def begin(self) -> None:
        """The session's first line: the machine, which all its cases are measured on."""
        found = {"machine": gpu_machine(), "source": digests(), "rehearsal": self.rehearsal}
        self.write(
            {
                "session": self.session,
                "at": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
                **found,
            }
        )

    def write(self, line: Mapping[str, object]) -> None:
        """Append a line, at once and whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                torn = file.read(1) != b"\n"  # a process was ended while it wrote
                file.write(b"\n" if torn else b"")
            file.write(json.dumps(line).encode() + b"\n")

    def case(self, stage: str, case: str, status: str, **more: object) -> None:
        self.write(
            {"session": self.session, "stage": stage, "case": case, "status": status, **more}
        )

    def lines(self) -> list[Line]:
        return list(_lines(self.path))

    def of_this_machine(self, among: int | None = None) -> dict[tuple[str, str], Line]:
        """The last line of every case that was run by this code on such a machine, by (stage,
        case); among the first so many lines, or all."""
        lines = self.lines()[:among]
        alike = self._alike(lines)
        return {
            (line["stage"], line["case"]): line
            for line in lines
            if "case" in line and line["session"] in alike(line["stage"])
        }

    def _alike(self, lines: list[Line]) -> Callable[[str], set[str]]:
        """By stage: sessions on such a machine, with the code that it runs; its own among them."""
        begun = [line for line in lines if _begins(line)]
        own = next((line for line in begun if line["session"] == self.session), None)

        @cache
        def sessions(stage: str) -> set[str]:
            if own is None:
                return set()
            wanted = _fingerprint(own, stage)
            return {line["session"] for line in begun if _fingerprint(line, stage) == wanted}

        return sessions

    def settled(self, stage: str, case: str) -> bool:
        """Whether a case need not be run."""
        line = self.of_this_machine().get((stage, case))
        if line is None or line["status"] not in ENDED:
            return False
        return not (self.retry and line["status"] == "failed" and line["session"] != self.session)

    def whole(self, stage: str, small: bool = False) -> bool:
        """Whether the stage has come to its end, or that of its `small` cases, with every case done
        or failed."""
        lines = self.lines()
        alike = self._alike(lines)(stage)
        own = [line for line in lines if line["session"] in alike and line.get("stage") == stage]
        ends = [
            line["ended"] for line in own if "ended" in line and (small or not line.get("small"))
        ]
        ended = any(end.startswith("ended") for end in ends)
        return ended and all(
            self.settled(*key) for key in self.of_this_machine() if key[0] == stage
        )

    def open_cases(self, stage: str) -> list[Line]:
        """The first lines of those cases of this session that were started and have not ended:
        where a process died."""
        found: dict[str, Line] = {}
        for line in self.lines():
            if line["session"] == self.session and line.get("stage") == stage and "case" in line:
                found.pop(line["case"], None)
                if line["status"] == "started":
                    found[line["case"]] = line
        return list(found.values())

    def rows(self, stage: str) -> list[Line]:
        """What was measured on such a machine, by this code."""
        found = [line for (of, _), line in self.of_this_machine().items() if of == stage]
        return [row for line in found for row in line.get("rows", [])]


def measured(folder: Path, stage: str) -> list[Line]:
    """The rows of a stage on the GPU that was used last, of sessions whose check passed; none of a
    rehearsal. A case that was run again counts once."""
    lines = list(_lines(folder / FILE))
    sessions = [line for line in lines if _begins(line) and not line["rehearsal"]]
    if not sessions:
        return []
    last = sessions[-1]["machine"]["gpu"]
    alike = {line["session"] for line in sessions if line["machine"]["gpu"] == last}
    if stage != CHECK:
        alike &= {session for session, why in checks(lines).items() if why == ""}
    cases = {
        line["case"]: line
        for line in lines
        if line.get("stage") == stage and line["session"] in alike and line.get("status") in ENDED
    }
    return [row for line in cases.values() for row in line.get("rows", [])]


def checks(lines: Iterable[Line]) -> dict[str, str]:
    """By session whose check has ended: why it failed, or nothing."""
    found: dict[str, str] = {}
    for line in lines:
        if line.get("stage") == CHECK and line.get("status") in ENDED:
            rows = line.get("rows", [])
            failures = [why for row in rows[-1:] for why in row.get("failures", [])]
            errors = [f"{each['error']}: {each['message']}" for each in line.get("failures", [])]
            found[line["session"]] = (
                ""
                if line["status"] == "done"
                else "; ".join([*errors, *failures] or ["it does not hold"])
            )
    return found


def measured_on(folder: Path) -> Line | None:
    """The last session's first line that is no rehearsal's: machine, versions, digest of the
    code."""
    sessions = [line for line in _lines(folder / FILE) if _begins(line) and not line["rehearsal"]]
    return sessions[-1] if sessions else None


def _begins(line: Line) -> bool:
    return "machine" in line


def _fingerprint(line: Line, stage: str) -> tuple[object, ...]:
    found, source = line["machine"], line["source"]
    return (
        tuple(source[room] for room in _RUN.get(stage, ROOMS))
        if isinstance(source, dict)
        else source,
        line["rehearsal"],
        str(found["gpu"]),
        found["torch"],
        found.get("triton"),
    )


def _lines(path: Path) -> Iterator[Line]:
    """All whole lines; what a process that was ended had half written is left out."""
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and "session" in line:
            yield line
