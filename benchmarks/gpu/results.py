"""What the stages find, in one file: a line of JSON for every case, written when the case ends.

So a run that is cut off loses one case, and the next one goes on with what is left. A case is
`done`, `failed` (with the error; its other rows stand), `missing` (with the reason: time, memory, a
tool that is not there), or `cut` off with its process. Those that are done or failed are not run
again on the same machine with the same code; the last line of a case counts. Everything is in one
file because a machine that is lent may give back only a few.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from isobit.kernels.gpu import find_gpu, versions

FILE = "results.jsonl"
ENDED = ("done", "failed")
SOURCE = Path(__file__).resolve().parents[2] / "src" / "isobit"

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


def source_digest() -> str:
    """A digest of isobit's Python files: it names the code also where the tree has no repository
    around it."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(str(path.relative_to(SOURCE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


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
        found = {"machine": gpu_machine(), "source": source_digest(), "rehearsal": self.rehearsal}
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
            if "case" in line and line["session"] in alike
        }

    def _alike(self, lines: list[Line]) -> set[str]:
        """Sessions on such a machine, with this code; its own among them."""
        own = next(
            (line for line in lines if _begins(line) and line["session"] == self.session), None
        )
        begun = [line for line in lines if _begins(line)] if own is not None else []
        return {line["session"] for line in begun if _fingerprint(line) == _fingerprint(own)}

    def settled(self, stage: str, case: str) -> bool:
        """Whether a case need not be run."""
        line = self.of_this_machine().get((stage, case))
        if line is None or line["status"] not in ENDED:
            return False
        return not (self.retry and line["status"] == "failed" and line["session"] != self.session)

    def whole(self, stage: str) -> bool:
        """Whether the stage has come to its end, with every case done or failed."""
        lines = self.lines()
        alike = self._alike(lines)
        own = [line for line in lines if line["session"] in alike and line.get("stage") == stage]
        ends = [line["ended"] for line in own if "ended" in line]
        ended = any(end.startswith("ended") for end in ends)
        return ended and all(
            self.settled(*key) for key in self.of_this_machine() if key[0] == stage
        )

    def open_case(self, stage: str) -> str | None:
        """The case of this session that was started and has not ended: where a process died."""
        found: str | None = None
        for line in self.lines():
            if line["session"] == self.session and line.get("stage") == stage and "case" in line:
                found = (
                    line["case"]
                    if line["status"] == "started"
                    else None
                    if line["case"] == found
                    else found
                )
        return found

    def rows(self, stage: str) -> list[Line]:
        """What was measured on such a machine, by this code."""
        found = [line for (of, _), line in self.of_this_machine().items() if of == stage]
        return [row for line in found for row in line.get("rows", [])]


def measured(folder: Path, stage: str) -> list[Line]:
    """The rows of a stage on the GPU that was used last; none of a rehearsal. A case that was run
    again counts once."""
    lines = list(_lines(folder / FILE))
    sessions = [line for line in lines if _begins(line) and not line["rehearsal"]]
    if not sessions:
        return []
    last = sessions[-1]["machine"]["gpu"]
    alike = {line["session"] for line in sessions if line["machine"]["gpu"] == last}
    cases = {
        line["case"]: line
        for line in lines
        if line.get("stage") == stage and line["session"] in alike and line.get("status") in ENDED
    }
    return [row for line in cases.values() for row in line.get("rows", [])]


def measured_on(folder: Path) -> Line | None:
    """The last session's first line that is no rehearsal's: machine, versions, digest of the
    code."""
    sessions = [line for line in _lines(folder / FILE) if _begins(line) and not line["rehearsal"]]
    return sessions[-1] if sessions else None


def _begins(line: Line) -> bool:
    return "machine" in line


def _fingerprint(line: Line) -> tuple[object, ...]:
    found = line["machine"]
    return (
        line["source"],
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
