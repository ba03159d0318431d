"""A directory that has a config.json and nothing else."""

import json
from pathlib import Path

from isobit.model import ModelConfig


def model_folder(folder: Path, config: ModelConfig) -> Path:
    """Of this architecture."""
    path = folder / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_hf()))
    return path
