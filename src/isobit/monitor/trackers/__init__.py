"""Experiment trackers: TensorBoard, Weights & Biases, trackio and MLflow, each a copy of a run's `metrics.jsonl`.

All of them get the same metric names. A tracker runs in its own process, so that nothing it does (import, print,
raise, hang) affects a step. Imports no tracker's library, and no torch.
"""

from isobit.monitor.trackers.table import TRACKERS

__all__ = ["TRACKERS"]
