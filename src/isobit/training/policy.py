"""Verb 1, sync: the working weights that sample and learn become those of the masters."""

from isobit.model.adapters.low_rank import update_norm
from isobit.training.context import Context
from isobit.training.measuring.statistics import WeightTotals


class Policy:
    """The model of a run, and the scales of its KV cache where they are calibrated."""

    def __init__(self, context: Context) -> None:
        self._context, self.model = context, context.parts.model
        self.weights: WeightTotals
        """How the weights of the present step are quantized."""

    def sync(self) -> None:
        """Begin a step: `refresh`, and measure what quantization does to the weights."""
        meter = self._context.meter
        meter.begin()
        self.refresh()
        self.weights = WeightTotals(self.model)
        meter.metrics["sync/bytes"] = float(self.model.transformer.sync_bytes)
        if self.model.transformer.adapter is not None:
            adapters = (one for weight in self.model.transformer.rollout_weights() for one in weight.adapters)
            meter.metrics["adapter/update_norm"] = update_norm(adapters, self.model.ops)
        meter.metrics |= self.weights.metrics() | self._context.parts.calibrator.step_metrics()

    def refresh(self) -> None:
        """Requantize and make the scales of a calibrated KV cache fit, unless an evaluation did so after the last step;
        tell the reward functions which step it is."""
        parts, state = self._context.parts, self._context.state
        meter, saver = self._context.meter, self._context.saver
        counted = {"global_step": state.step, "max_steps": parts.config.steps}
        parts.rewards.trainer_state = counted | {"epoch": state.cursor / len(parts.task.train)}
        with meter.timed("sync"), saver.broken_weights_end_the_run():
            if not state.synced:
                self.model.sync()
        if parts.calibrator.active:
            count = self.model.precision.calibration.prompts
            with meter.timed("calibrate"), saver.broken_weights_end_the_run():
                if not state.synced:
                    parts.calibrator.calibrate([parts.task.train.at(state.cursor + i).prompt for i in range(count)])
        state.synced = True
