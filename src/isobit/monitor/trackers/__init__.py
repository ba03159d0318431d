"""Experiment trackers: TensorBoard, Weights & Biases, trackio and MLflow, each a copy of a run's
`metrics.jsonl` under the same names.

One process follows the file and feeds all of them (`follow.py`), so nothing that they do (import,
print, raise, hang) affects a step. A tracker is a class in its own module and an entry in
`settings.py`. Imports no tracker's library, and no torch.
"""
