"""What reward functions print: into a file of the run, or to stderr without a run.

Workers write into private files, which have no name and never make them wait; their parent copies
what is new at the end of a batch. So printing costs a run next to nothing, and cannot stop it.
Bounded: of one batch the last MAX_AT_ONCE bytes, of a run the last two files of MAX_FILE_BYTES.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from isobit.errors import printable

MAX_AT_ONCE = 1 << 20
MAX_FILE_BYTES = 8 << 20
OLDER = ".1"
"""At the end of the name of the file before."""


class Output:
    """The destination of printed lines: the file `path`, once there is one. `written`: whether the
    newest batch wrote to the file."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.written = False

    def add(self, left_out: int, text: bytes, heading: str) -> None:
        """Pass on what was printed; in a file, below a line with the heading."""
        if not text:
            return
        if left_out:
            text = f"({left_out:,} bytes left out)\n".encode() + text
        if not text.endswith(b"\n"):
            text += b"\n"
        if self.path is None:
            lines = text.decode("utf-8", "replace").splitlines()
            sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
            return
        with suppress(
            OSError
        ):  # a full disk ends the run where its own files are written, not here
            if self.path.is_file() and self.path.stat().st_size + len(text) > MAX_FILE_BYTES:
                os.replace(self.path, self.path.with_name(self.path.name + OLDER))
            with self.path.open("ab") as file:
                file.write(f"--- {heading}\n".encode() + text)
            self.written = True
