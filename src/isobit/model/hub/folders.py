"""The folder of a name on the Hub that this machine has downloaded; and what a folder without a
config.json is instead: the ending of the line that refuses it, with the folder to give.

People give the cache of the Hub, a run of this or another trainer, or a download of another format.
Nothing is taken in the place of such a folder: which of several checkpoints is meant is for its
user to say.
"""

import os
import re
from pathlib import Path

from isobit.errors import on_hub

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


def from_hub_cache(path: Path) -> Path:
    """Return the snapshot of a name on the Hub, `owner/name`, that `refs/main` names in the cache of
    huggingface_hub, which is only read; the path itself if it is there, or the cache has none."""
    if not on_hub(str(path)) or os.path.exists(path):
        return path
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    cache = os.path.expandvars(os.path.expanduser(cache))
    return _main_snapshot(Path(cache) / f"{_CACHED}{'--'.join(path.parts)}") or path


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
        snapshot = _snapshot(folder)
        return "; it is a model in the Hub's cache: " + (
            f"give {snapshot}" if snapshot else "it has no snapshot yet"
        )
    if "checkpoints" in names and "config.yaml" in names:
        newest = _newest(folder / "checkpoints", _names(folder / "checkpoints"))
        return "; it is a run: " + (
            f"give its newest checkpoint, {newest}" if newest else "it has no checkpoint yet"
        )
    if (inner := _newest(folder, names)) is not None:
        return f"; the model is in {inner}"
    for ending, format_name in _OTHER_FORMATS.items():
        if any(name.endswith(ending) for name in names):
            return f"; it has {format_name}"
    return ""


def other_format(file: Path) -> str | None:
    """Return what a file of another format is, and what to give in its place; None of any other."""
    return _OTHER_FORMATS.get(file.suffix.lower())


def _snapshot(cached: Path) -> Path | None:
    """Return the snapshot that `refs/main` names, or the only one."""
    names = _names(cached / "snapshots")
    only = cached / "snapshots" / names[0] if len(names) == 1 else None
    return _main_snapshot(cached) or only


def _main_snapshot(cached: Path) -> Path | None:
    """Return the snapshot that `refs/main` names, if it is there."""
    try:
        named = (
            (cached / "refs" / "main").read_text(encoding="ascii", errors="replace").strip()[:100]
        )
    except OSError:
        return None
    snapshot = cached / "snapshots" / named
    return snapshot if named in _names(cached / "snapshots") and snapshot.is_dir() else None


def _newest(folder: Path, names: list[str]) -> Path | None:
    """Return the folder with a model of the highest step among `folder`'s, or the only one."""
    models = [
        name
        for name in names
        if any((folder / name / f"{kind}.json").is_file() for kind in _MODELS)
    ]
    steps = {int(match[1]): name for name in models if (match := _CHECKPOINT.fullmatch(name))}
    if steps:
        return folder / steps[max(steps)]
    return folder / models[0] if len(models) == 1 else None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
