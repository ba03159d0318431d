"""Experiment trackers: TensorBoard, Weights & Biases, trackio and MLflow, each a copy of a run's `metrics.jsonl`.

Everyone gets the same metric names. A tracker runs in a process of its own, so that nothing it does (import, print,
raise, hang) touches a step. Imports no tracker's library, and no torch.
"""

from isobit.trackers.table import TRACKERS

__all__ = ["TRACKERS"]
