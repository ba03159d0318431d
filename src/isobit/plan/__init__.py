"""What a run takes on any number of GPUs: bytes and seconds, from its config and the config.json of its model.

Nothing is loaded and no GPU is asked. Memory is counted by formulas that tests compare with real runs; times are a
model, bytes and operations over what a device does in a second, with factors that others' published times were fitted
to (`devices.py`, `benchmarks/published.py`).
"""

from isobit.plan.devices import DEVICES, Device, device_named
from isobit.plan.estimate import Estimate, estimate
from isobit.plan.job import Job, Lengths, job_of
from isobit.plan.warnings import does_not_fit, warnings

__all__ = [
    "DEVICES",
    "Device",
    "Estimate",
    "Job",
    "Lengths",
    "device_named",
    "does_not_fit",
    "estimate",
    "job_of",
    "warnings",
]
