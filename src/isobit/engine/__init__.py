"""Rollout: continuous batching over a paged cache of keys and values, counter-based sampling."""

from isobit.engine.calibration import Calibrator
from isobit.engine.engine import Engine
from isobit.engine.sequences import Stats
from isobit.engine.types import Completion, Sampling, Ticket

__all__ = ["Calibrator", "Completion", "Engine", "Sampling", "Stats", "Ticket"]
