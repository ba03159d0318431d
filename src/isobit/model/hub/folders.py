"""What a folder without a config.json is instead: the ending of the line that refuses it, with the
folder to give.

People give the cache of the Hub, a run of this or another trainer, or a download of another format.
Nothing is taken in the place of what was given: which of several checkpoints is meant is for its
user to say.
"""

import os
import re
from pathlib import Path

_CACHED = "models--"
_CHECKPOINT = re.compile(r"(?:step|checkpoint|global_step)[-_]?(\d+)")
_MODELS = ("config", "adapter_config")
_OTHER_FORMATS = {
    ".gguf": "GGUF files, which are not read; download the model's own repository, in safetensors",
    ".pth": "Meta's own format, which is not read; the Hugging Face form of the model has a "
    "config.json",
    ".distcp": "a distributed checkpoint, which is not read; export it to Hugging Face's form "
    "with what wrote it",
}


def instead(folder: Path) -> str:
    """Return what `folder` is, and what to give in its place, as the end of a message; "" where it
    is not known."""
    names = _names(folder)
    cached = [name for name in names if name.startswith(_CACHED)]
    if cached:
        at = _snapshot(folder / cached[0]) or folder / cached[0] / "snapshots"
        return (
            f"; it is a cache of the Hub, with {len(cached)} models: give a snapshot in it, "
            f"such as {at}"
        )
    if any(name.startswith(_CACHED) for name in _names(folder / "hub")):
        return instead(folder / "hub")
    if folder.name.startswith(_CACHED) or {"blobs", "refs", "snapshots"} <= {*names}:
        found = _snapshot(folder)
        return "; it is a model in the Hub's cache: " + (
            f"give {found}" if found else "it has no snapshot yet"
        )
    if "checkpoints" in names and "config.yaml" in names:
        newest = _newest(folder / "checkpoints", _names(folder / "checkpoints"))
        return "; it is a run: " + (
            f"give its newest checkpoint, {newest}" if newest else "it has no checkpoint yet"
        )
    if (inner := _newest(folder, names)) is not None:
        return f"; the model is in {inner}"
    for ending, what in _OTHER_FORMATS.items():
        if any(name.endswith(ending) for name in names):
            return f"; it has {what}"
    return ""


def other_format(file: Path) -> str | None:
    """Return what a file of another format is, and what to give in its place; None of any other."""
    return _OTHER_FORMATS.get(file.suffix.lower())


def _snapshot(cached: Path) -> Path | None:
    """Return the snapshot that `refs/main` names, or the only one."""
    names = _names(cached / "snapshots")
    try:
        named = (
            (cached / "refs" / "main").read_text(encoding="ascii", errors="replace").strip()[:100]
        )
    except OSError:
        named = ""
    chosen = named if named in names else names[0] if len(names) == 1 else None
    return None if chosen is None else cached / "snapshots" / chosen


def _newest(folder: Path, names: list[str]) -> Path | None:
    """Return the folder with a model of the highest step among `folder`'s, or the only one."""
    models = [
        name
        for name in names
        if any((folder / name / f"{kind}.json").is_file() for kind in _MODELS)
    ]
    steps = {int(found[1]): name for name in models if (found := _CHECKPOINT.fullmatch(name))}
    if steps:
        return folder / steps[max(steps)]
    return folder / models[0] if len(models) == 1 else None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
