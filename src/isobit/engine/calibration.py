"""Calibrate the static scales of an FP8 KV cache, after every change of the weights and with the
weights as they are; or once, or never.

On prompts: a forward of the rollout's flow over some of them. On a batch, as NeMo RL does: a
forward over the whole batch that was learned from last, by the learner's flow, after the update;
before the first batch, over the prompts. What is calibrated stays in the compute format meanwhile,
so that scales of an earlier step have no part in the new ones. A checkpoint holds `state`, so that
a resumed run goes on with the bits of one that was never stopped.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from isobit.engine.prompts import Prompt, encode
from isobit.kernels import Layout
from isobit.model import Model
from isobit.model.forward.kv_scales import AmaxRecorder, KVScales, scales_from
from isobit.model.forward.storage import new_store

_FORWARD_TOKENS = 16384


@torch.no_grad()
def measured_amax(
    model: Model, sequences: Sequence[Sequence[int]], use: str, most_tokens: int
) -> Tensor:
    """Return amax [layers, 2] of K and V, or [layers, 3] with Q where queries are calibrated, under
    the flow of `use`: the percentile over forwards of at most `most_tokens` tokens each (a longer
    sequence has a forward alone)."""
    transformer, config, precision = model.transformer, model.config, model.precision
    recorder = AmaxRecorder(config.num_layers, precision.calibrated_queries)
    flow = precision.rollout if use == "rollout" else precision.learner
    device = transformer.ops[use].device
    with transformer.watched(recorder, use):
        for batch in _forwards(sequences, most_tokens):
            layout = Layout.packed([len(ids) for ids in batch])
            size = layout.num_slots // layout.page_size, layout.page_size
            stores = [
                new_store(config, layer, flow, *size, device, None)
                for layer in range(config.num_stores)
            ]
            tokens = torch.tensor([token for ids in batch for token in ids], dtype=torch.int64)
            transformer.hidden(tokens, layout, stores, use=use, calibrating=True)
    transformer.ops[use].raise_faults()
    return recorder.amax(precision.calibration.percentile)


def prompt_amax(model: Model, prompts: Sequence[Prompt], use: str = "rollout") -> Tensor:
    """Return `measured_amax` of some prompts in one forward: one batch of NeMo's rule."""
    sequences = encode(prompts, model.tokenizer, model.config.vocab_size)
    return measured_amax(model, sequences, use, sum(map(len, sequences)))


def _forwards(
    sequences: Sequence[Sequence[int]], most_tokens: int
) -> Iterator[list[Sequence[int]]]:
    batch, tokens = list[Sequence[int]](), 0
    for sequence in sequences:
        if batch and tokens + len(sequence) > most_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(sequence)
        tokens += len(sequence)
    if batch:
        yield batch


class Calibrator:
    """Keeps a model's scales fresh; `most_tokens` of one forward over a training batch."""

    def __init__(self, model: Model, most_tokens: int = _FORWARD_TOKENS) -> None:
        self.model, self.most_tokens = model, most_tokens
        self._batch: list[Sequence[int]] = []
        self._of_last_step: KVScales | None = None
        self._kept: Tensor | None = None

    @property
    def active(self) -> bool:
        """Whether there is anything to calibrate."""
        return self.model.precision.calibrated

    def learned_from(self, sequences: Sequence[Sequence[int]]) -> None:
        """Keep a batch that was learned from, as tokens, where a calibration is to come on it."""
        calibration = self.model.precision.calibration
        over = calibration.schedule == "never" or self._kept is not None
        if self.active and calibration.data == "batch" and not over:
            self._batch = list(sequences)

    def calibrate(self, prompts: Sequence[Prompt]) -> None:
        """Set the scales for the present weights; `prompts` are those of the step that comes."""
        if not self.active:
            return
        precision, version = self.model.precision, self.model.weights_version
        calibration = precision.calibration
        if calibration.schedule == "never":
            sides = 3 if precision.calibrated_queries else 2
            scales = KVScales(torch.ones(self.model.config.num_layers, sides), version)
        elif self._kept is not None:
            scales = KVScales(self._kept, version)
        else:
            scales = scales_from(self._amax(prompts), calibration, version)
            if calibration.schedule == "once" and (self._batch or calibration.data == "prompts"):
                self._kept, self._batch = scales.values, []
        self.model.transformer.calibrate(scales)

    def _amax(self, prompts: Sequence[Prompt]) -> Tensor:
        calibration = self.model.precision.calibration
        if self._batch:
            return measured_amax(self.model, self._batch, "learner", self.most_tokens)
        return prompt_amax(self.model, prompts[: calibration.prompts], calibration.use)

    def step_metrics(self) -> dict[str, float]:
        """Return the metrics of a training step's scales, and their distance from the last step's;
        empty without calibrated scales."""
        scales = self.model.transformer.kv_scales
        if not self.active or scales is None:
            return {}
        drift, self._of_last_step = scales.drift(self._of_last_step), scales
        k, v = scales.values[:, :2].unbind(1)
        metrics = {
            "quant/kv_scale_k_mean": float(k.mean()),
            "quant/kv_scale_v_mean": float(v.mean()),
            "quant/kv_scale_drift": drift,
        }
        if self.model.precision.calibrated_queries:
            metrics["quant/query_scale_mean"] = float(scales.values[:, 2].mean())
        return metrics

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: the scales of the last step, the scales that stay,
        and the batch that the next ones are computed on."""
        tensors = {} if self._of_last_step is None else {"scales": self._of_last_step.values}
        if self._kept is not None:
            tensors["kept"] = self._kept
        if not self._batch:
            return tensors
        tokens = torch.tensor([token for ids in self._batch for token in ids], dtype=torch.int32)
        return tensors | {
            "tokens": tokens,
            "lengths": torch.tensor([len(ids) for ids in self._batch]),
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._of_last_step = KVScales(tensors["scales"], -1) if "scales" in tensors else None
        self._batch, self._kept = [], tensors.get("kept")
        if "tokens" in tensors:
            self._batch = [
                sequence.tolist()
                for sequence in tensors["tokens"].split(tensors["lengths"].tolist())
            ]


def calibrate_after(
    model: Model, prompts: Sequence[Prompt], sequences: Sequence[Sequence[int]]
) -> None:
    """Set a model's scales, if it has any, as those of a step after one that learned from the
    sequences."""
    calibrator = Calibrator(model)
    calibrator.learned_from(sequences)
    calibrator.calibrate(prompts)
