"""The `tracking` section: which experiment trackers get a copy of a run's metrics, and how."""

import re
from difflib import get_close_matches
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from isobit.config.sections import Section

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
_CREDENTIALS = {
    "wandb": "set WANDB_API_KEY, or run `wandb login`",
    "trackio": "set HF_TOKEN, or run `hf auth login`",
    "mlflow": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
}


class WandbConfig(Section):
    """Weights & Biases. Credentials come from WANDB_API_KEY or `wandb login`."""

    entity: str | None = Field(None, description="user or team; default: the account's own")
    mode: Literal["online", "offline"] | None = Field(None, description="default: $WANDB_MODE, else online")
    tags: tuple[str, ...] = ()


class TrackioConfig(Section):
    """trackio. Without dir, its own variable TRACKIO_DIR counts."""

    dir: str | None = Field(None, description="directory of its database; default: in the run directory")
    space_id: str | None = Field(None, description="a Hugging Face Space, user/name, to log to instead")


class MlflowConfig(Section):
    """MLflow. Without uri, its own variable MLFLOW_TRACKING_URI counts."""

    uri: str | None = Field(
        None, description="a server, a database (needs `mlflow`), or file:PATH; default: in the run directory"
    )

    @field_validator("uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri is not None and re.search(r"://[^/@]*:[^/@]*@", uri):
            raise ValueError("a password does not belong into a config, which is kept; set MLFLOW_TRACKING_URI instead")
        return uri


class TrackingConfig(Section):
    """Experiment trackers (`pip install "isobit[track]"`). `metrics.jsonl` is written with or without them."""

    trackers: tuple[TrackerName, ...] = Field((), description="tensorboard, wandb, trackio, mlflow")
    project: str = Field("isobit", description="project or experiment")
    name: str | None = Field(None, description="name of the run; default: that of the run directory")
    group: str | None = Field(None, description="group of the run, such as one comparison")
    completions: int = Field(0, ge=0, description="completions sent per step, as a table; 0: none")
    close_s: float = Field(15.0, gt=0, description="seconds to wait at the end of a run for unsent steps")
    wandb: WandbConfig = WandbConfig()
    trackio: TrackioConfig = TrackioConfig()
    mlflow: MlflowConfig = MlflowConfig()

    @model_validator(mode="before")
    @classmethod
    def _no_credentials(cls, values: Any) -> Any:
        """Credentials would land in the run's config.yaml."""
        for name, where in _CREDENTIALS.items():
            section = values.get(name) if isinstance(values, dict) else None
            for key in section if isinstance(section, dict) else ():
                if re.search("key|token|password|secret", str(key)):
                    raise ValueError(f"{name}.{key}: credentials do not belong into a config, which is kept; {where}")
        return values

    @field_validator("trackers", mode="before")
    @classmethod
    def _known(cls, names: Any) -> Any:
        known = get_args(TrackerName)
        if not isinstance(names, (list, tuple)):
            raise ValueError(f"expected a list of {', '.join(known)}, such as [wandb], got {names!r}")
        for name in names:
            if name not in known:
                close = get_close_matches(str(name), known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
                raise ValueError(f"unknown tracker {name!r}; {hint}")
        if len(set(names)) < len(names):
            raise ValueError("a tracker is named twice")
        return names
