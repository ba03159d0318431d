"""The place of the config of `isobit quickstart`: in the package, or among the configs of a
checkout."""

from pathlib import Path

import isobit
from isobit.errors import IsobitError


def config_file() -> Path:
    """Return the path of the config, relative to the present directory if it is inside it. Raises
    IsobitError for an installation without the config."""
    package = Path(isobit.__file__).resolve().parent
    files = [folder / "configs" / "quickstart.yaml" for folder in (package, package.parents[1])]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise IsobitError(f"{files[0]}: not there; install isobit again, from its whole source")
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
