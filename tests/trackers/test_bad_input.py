"""What is wrong with trackers at the start: one line, exit code 2, and no run directory."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.monitor.trackers.settings import MlflowConfig
from isobit.training.train import train
from tests.runs import write_config

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trackers=[wandbb]",
            "tracking.trackers.0: expected tensorboard, wandb, trackio or mlflow, got 'wandbb'",
        ),
        ("trackers=[comet]", "expected tensorboard, wandb, trackio or mlflow, got 'comet'"),
        ("trackers=null", "tracking.trackers: expected a list, such as [tensorboard], got nothing"),
        ("trackers=[wandb,wandb]", "tracking.trackers: a tracker is named twice"),
        (
            "wandb.api_key=s3cret",
            "tracking: wandb.api_key: credentials do not belong into a config",
        ),
        ("mlflow.token=s3cret", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        *(
            (
                f"mlflow.uri='{uri}'",
                "tracking.mlflow.uri: a password or a token does not belong into a config",
            )
            for uri in (
                "https://me:s3cret@host",
                "https://me:s3@cret@host",
                "http://s3cret@host:5000/path",
                "http://host:5000?token=s3cret",
                "https://host/path?a=b&access_token=s3cret",
                "https://host/#api_key=s3cret",
                "https://host/?%74oken=s3cret",
                "HTTPS://host/?X-Auth=s3cret",
                "postgresql://me:s3cret@host/db",
                "postgresql://host/db?user=me&password=s3cret",
            )
        ),
        (
            "wandb.entitty=me",
            "unknown key 'tracking.wandb.entitty' (did you mean 'tracking.wandb.entity'?)",
        ),
        ("wandb.mode=off", "tracking.wandb.mode: expected online or offline"),
        ("close_s=0", "tracking.close_s: expected above 0"),
        ("completions=-1", "tracking.completions: expected at least 0"),
    ],
)
def test_wrong_values(
    tmp_path: Path, base_model: Path, refused: Refused, override: str, message: str
) -> None:
    line = refused("train", write_config(tmp_path, base_model), f"tracking.{override}")
    assert message in line
    assert "s3cret" not in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "uri",
    [
        "http://host:5000",
        "http://[::1]:5000/path?workspace=a@b",
        "postgresql://me@host/db?sslkey=client.key",
        "sqlite:////tmp/a@b.db",
        "file:/tmp/a:b@c",
        "databricks://profile",
    ],
)
def test_an_address_without_credentials_is_taken(uri: str) -> None:
    """The control."""
    assert MlflowConfig(uri=uri).uri == uri


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_IDENTITY_TOKEN_FILE",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))


def test_wandb_without_credentials(
    tmp_path: Path, base_model: Path, refused: Refused, no_credentials: None
) -> None:
    line = refused("train", write_config(tmp_path, base_model), "tracking.trackers=[wandb]")
    assert (
        "wandb has no credentials; run `wandb login`, set WANDB_API_KEY, or stay offline: "
        "WANDB_MODE=offline"
    ) in line
    assert not (tmp_path / "run").exists()


def test_wandb_with_a_key_of_the_wrong_form(
    tmp_path: Path,
    base_model: Path,
    refused: Refused,
    no_credentials: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "short")
    line = refused("train", write_config(tmp_path, base_model), "tracking.trackers=[wandb]")
    assert "API key" in line
    assert not (tmp_path / "run").exists()


def test_a_space_without_a_token(
    tmp_path: Path, base_model: Path, refused: Refused, no_credentials: None
) -> None:
    config = write_config(tmp_path, base_model)
    line = refused(
        "train", config, "tracking.trackers=[trackio]", "tracking.trackio.space_id=me/runs"
    )
    assert "tracking.trackio.space_id needs a token of Hugging Face; run `hf auth login`" in line
    assert not (tmp_path / "run").exists()


def test_a_database_without_what_it_needs(
    tmp_path: Path, base_model: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "sqlalchemy" else object()
    )
    config = write_config(tmp_path, base_model)
    line = refused(
        "train", config, "tracking.trackers=[mlflow]", "tracking.mlflow.uri=sqlite:///runs.db"
    )
    assert "a database needs the whole of MLflow; pip install mlflow" in line


def test_resuming_is_refused_as_starting_is_and_goes_on_without(
    tmp_path: Path, base_model: Path, refused: Refused, no_credentials: None
) -> None:
    """A tracker that cannot be used any more loses no run: leave it out."""
    train(load_config(write_config(tmp_path, base_model), ["steps=2"]), quiet=True)
    run = tmp_path / "run"
    assert "no credentials" in refused(
        "train", "--resume", run, "steps=3", "tracking.trackers=[wandb]"
    )
    assert "only these may change: steps, " in refused("train", "--resume", run, "seed=3")


def test_track(tmp_path: Path, base_model: Path, refused: Refused) -> None:
    assert "is not a run directory" in refused("track", tmp_path)
    train(load_config(write_config(tmp_path, base_model), ["steps=1"]), quiet=True)
    assert "no tracker to send it to: give tracking.trackers" in refused("track", tmp_path / "run")
    assert "only tracking.* may change" in refused("track", tmp_path / "run", "steps=2")


def test_the_saved_config_has_no_secret_of_the_environment(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "s3cret" * 8)
    config = write_config(tmp_path, base_model, tracking={"trackers": ["tensorboard"]})
    run = train(load_config(config, ["steps=1"])).run_dir
    kept = [path for path in run.rglob("*") if path.is_file()]
    assert run / "tracking/state.json" in kept
    assert not any(b"s3cret" in path.read_bytes() for path in kept)
