"""What to say where a path looks like a name on the Hugging Face Hub: isobit downloads nothing."""

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = {
    ".jsonl",
    ".ndjson",
    ".json",
    ".csv",
    ".tsv",
    ".parquet",
    ".pq",
    ".gz",
    ".yaml",
    ".yml",
    ".py",
    ".safetensors",
}


def download_hint(path: str | Path, *, data: bool = False) -> str:
    """How to get what is called `path` there, as the end of a message; empty where it does not look like such a name.

    `owner/name` is one, unless it ends like a file or the folder `owner` is here.
    """
    name = str(path)
    if not _NAME.fullmatch(name) or Path(name).suffix.lower() in _FILES or Path(name).parent.exists():
        return ""
    place, kind = ("data", " --repo-type dataset") if data else ("models", "")
    folder = f"{place}/{name.rpartition('/')[2]}"
    return f"; isobit reads what is here already: hf download {name}{kind} --local-dir {folder}, then give {folder}"
