"""Verb 1, sync: the working weights that sample and learn become those of the masters."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from isobit.model.adapters.low_rank import update_norm
from isobit.training.context import RunContext
from isobit.training.measuring.statistics import WeightTotals


@dataclass(frozen=True, eq=False)
class Synced:
    """When the step `began` (`time.perf_counter`), what syncing measured, and how the weights are
    quantized."""

    began: float
    metrics: Mapping[str, float]
    weights: WeightTotals


class Policy:
    """The model of a run, and the scales of its KV cache where they are calibrated, on training
    prompts."""

    def __init__(self, context: RunContext) -> None:
        trained, self._train = context.trained, context.train
        self.model, self._calibrator = trained.model, trained.calibrator
        self._state, self._meter, self._saver = context.state, context.meter, context.saver

    def sync(self) -> Synced:
        """Begin a step: `refresh`, and measure what quantization does to the weights."""
        began = time.perf_counter()
        metrics = self.refresh()
        transformer, weights = self.model.transformer, WeightTotals(self.model)
        metrics["sync/bytes"] = float(transformer.sync_bytes)
        if transformer.adapter is not None:
            adapters = (a for weight in transformer.rollout_weights() for a in weight.adapters)
            metrics["adapter/update_norm"] = update_norm(adapters, self.model.ops)
        metrics |= weights.metrics() | self._calibrator.step_metrics()
        return Synced(began, metrics, weights)

    def refresh(self) -> dict[str, float]:
        """Requantize and make the scales of a calibrated KV cache fit, unless an evaluation did so
        after the last step; returns the seconds."""
        took: dict[str, float] = {}
        state, saver = self._state, self._saver
        with self._meter.timed(took, "sync"), saver.broken_weights_end_the_run():
            if not state.synced:
                self.model.sync()
        if self._calibrator.active:
            count = self.model.precision.calibration.prompts
            with self._meter.timed(took, "calibrate"), saver.broken_weights_end_the_run():
                if not state.synced:
                    prompts = [self._train.at(state.cursor + i).prompt for i in range(count)]
                    self._calibrator.calibrate(prompts)
        state.synced_step = state.step
        return took
