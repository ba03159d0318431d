"""The `tracking` section: the experiment trackers that get a copy of a run's metrics.

Each tracker is listed here with its library, its class and its options. Left out: the trackers
themselves (their modules).
"""

import importlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from isobit.errors import IsobitError
from isobit.monitor.trackers.base import Tracker
from isobit.options.declare import OneOf, above, at_least
from isobit.options.reading import OptionError


@dataclass(frozen=True)
class Entry:
    """A tracker. `library`: the library that is imported; `kind`: the class in
    `isobit.monitor.trackers.<name>`; `credentials`: the place for credentials, if the tracker takes
    any; `package`: the package for pip, if its name is not that of the library."""

    library: str
    kind: str
    credentials: str = ""
    package: str = ""


TRACKERS = {
    "tensorboard": Entry("tensorboard", "TensorBoard"),
    "wandb": Entry("wandb", "WeightsAndBiases", "set WANDB_API_KEY, or run `wandb login`"),
    "trackio": Entry("trackio", "Trackio", "set HF_TOKEN, or run `hf auth login`"),
    "mlflow": Entry(
        "mlflow",
        "MLflow",
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        "mlflow-skinny",
    ),
}


_CREDENTIALS = re.compile(
    r"://[^/?#]*:[^/?#]*@|https?://[^/?#]*@"  # for a database, a user's name alone is not one
    r"|[?&;#](?:[^=&;#]*(?:token|passw|pwd|secret|auth|signature|(?:api|access)[-_]?key)[^=&;#]*"
    r"|key|sig)=",
    re.IGNORECASE,
)
"""The credentials in an address: before its host, and among its parameters."""


def make_tracker(name: str) -> Tracker:
    """Make the tracker of a name, not yet open. Raises IsobitError without its library."""
    entry = TRACKERS[name]
    if importlib.util.find_spec(entry.library) is None:
        raise IsobitError(
            f"tracking.trackers: {name} is not installed: pip install {entry.package or name}"
        )
    module = importlib.import_module(f"isobit.monitor.trackers.{name}")
    tracker: Tracker = getattr(module, entry.kind)()
    return tracker


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases. Credentials come from WANDB_API_KEY or `wandb login`."""

    entity: Annotated[str | None, "user or team; default: the account's own"] = None
    mode: Annotated[Literal["online", "offline"] | None, "default: $WANDB_MODE, else online"] = None
    tags: Annotated[tuple[str, ...], "tags of the run"] = ()


@dataclass(frozen=True)
class TrackioConfig:
    """trackio. Without dir, its own variable TRACKIO_DIR counts."""

    dir: Annotated[str | None, "directory of its database; default: in the run directory"] = None
    space_id: Annotated[str | None, "a Hugging Face Space, user/name, to log to instead"] = None


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow. Without uri, its own variable MLFLOW_TRACKING_URI counts."""

    uri: Annotated[
        str | None,
        "a server, a database (needs `mlflow`), or file:PATH; default: in the run directory",
    ] = None

    def __post_init__(self) -> None:
        if self.uri is not None and _CREDENTIALS.search(unquote(self.uri)):
            text = (
                "a password or a token does not belong into a config, which is kept; set "
                "MLFLOW_TRACKING_URI instead"
            )
            raise OptionError(("uri",), text)


@dataclass(frozen=True)
class TrackingConfig:
    """Experiment trackers, whose libraries are extras. `metrics.jsonl` is written with or
    without them."""

    trackers: Annotated[
        tuple[Annotated[str, OneOf(TRACKERS)], ...], "tensorboard, wandb, trackio, mlflow"
    ] = ()
    project: Annotated[str, "project or experiment"] = "isobit"
    name: Annotated[str | None, "name of the run; default: that of the run directory"] = None
    group: Annotated[str | None, "group of the run, such as one comparison"] = None
    completions: Annotated[int, at_least(0), "completions sent per step, as a table; 0: none"] = 0
    close_s: Annotated[float, above(0), "seconds to wait at the end of a run for unsent steps"] = (
        15.0
    )
    wandb: WandbConfig = WandbConfig()
    trackio: TrackioConfig = TrackioConfig()
    mlflow: MlflowConfig = MlflowConfig()

    def __post_init__(self) -> None:
        if len(set(self.trackers)) < len(self.trackers):
            raise OptionError(("trackers",), "a tracker is named twice")


def without_credentials(values: Any) -> Any:
    """Return the values of the `tracking` section unchanged. Raises IsobitError for credentials,
    which would be written to config.yaml."""
    for name, entry in TRACKERS.items():
        section = values.get(name) if isinstance(values, Mapping) else None
        for key in section if isinstance(section, Mapping) else ():
            if re.search("key|token|password|secret", str(key)):
                raise IsobitError(
                    f"{name}.{key}: credentials do not belong into a config, which is kept; "
                    f"{entry.credentials}"
                )
    return values
