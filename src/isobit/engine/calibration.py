"""Calibrate the static scales of an FP8 KV cache, after every change of the weights.

On the rollout's side: a forward over some prompts, during which keys and values stay in the compute format, so that
scales of an earlier step have no part in the new ones. On the learner's side: the amax that it recorded while it
learned from the last batch; before the first batch, the prompts. A checkpoint holds `state`, so that a resumed run goes
on with the bits of one that was never stopped.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isobit.engine.prompts import Prompt, encode
from isobit.kernels import KVStore, Layout
from isobit.model import Model
from isobit.model.kv_scales import AmaxRecorder, KVScales, scales_from


@torch.no_grad()
def prompt_amax(model: Model, prompts: Sequence[Prompt]) -> Tensor:
    """amax [layers, 2] of K and V under the rollout's flow, in one forward over all: one batch of NeMo's rule."""
    transformer, config = model.transformer, model.config
    transformer.recorder = recorder = AmaxRecorder(config.num_layers)
    compute = model.precision.rollout.compute
    try:
        token_ids = encode(prompts, model.tokenizer, config.vocab_size)
        layout = Layout.packed([len(ids) for ids in token_ids])
        device = transformer.ops["rollout"].device
        shape = (layout.num_slots, config.num_kv_heads, config.head_dim)
        stores = [KVStore.allocate(*shape, None, compute, device=device) for _ in range(config.num_layers)]
        tokens = torch.tensor([token for ids in token_ids for token in ids], dtype=torch.int64)
        transformer.hidden(tokens, layout, stores, use="rollout")
    finally:
        transformer.recorder = None
    return recorder.amax(model.precision.calibration.percentile)


class Calibrator:
    """Keeps a model's scales fresh. `learner_amax` [layers, 2] is what the learner recorded last."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.learner_amax: Tensor | None = None
        self._of_last_step: KVScales | None = None

    @property
    def active(self) -> bool:
        """Whether there is anything to calibrate."""
        return self.model.precision.calibrated

    def calibrate(self, prompts: Sequence[Prompt]) -> None:
        """Set the scales for the present weights; `prompts` are those of the step that comes."""
        if not self.active:
            return
        calibration = self.model.precision.calibration
        if calibration.side == "learner" and self.learner_amax is not None:
            amax = self.learner_amax
        else:
            amax = prompt_amax(self.model, prompts[: calibration.prompts])
        self.model.transformer.kv_scales = scales_from(amax, calibration, self.model.weights_version)

    def step_metrics(self) -> dict[str, float]:
        """The scales of a training step, and how far they are from the last step's; empty if there are none."""
        scales = self.model.transformer.kv_scales
        if not self.active or scales is None:
            return {}
        drift, self._of_last_step = scales.drift(self._of_last_step), scales
        k, v = scales.values.unbind(1)
        return {
            "quant/kv_scale_k_mean": float(k.mean()),
            "quant/kv_scale_v_mean": float(v.mean()),
            "quant/kv_scale_drift": drift,
        }

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the scales of the last step, and the learner's amax."""
        found = {} if self._of_last_step is None else {"scales": self._of_last_step.values}
        return found if self.learner_amax is None else found | {"amax": self.learner_amax}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        self.learner_amax = tensors.get("amax")
        self._of_last_step = KVScales(tensors["scales"], -1) if "scales" in tensors else None
