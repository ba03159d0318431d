"""Working weights as they were, on the CPU, to be put back when later updates have moved them.

Left out: when that is needed (`training/sampled_ahead.py`)."""

import torch

from isobit.model.transformer import Transformer


class KeptWeights:
    """A CPU copy of the learner's working weights, and with them of a rollout that shares their
    storage."""

    @torch.no_grad()
    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer
        self._copies = [tensor.to("cpu", copy=True) for tensor in transformer.learner_storage()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Overwrite what moved. The masters are those of now: the next sync makes working weights
        of them again."""
        for into, kept in zip(self._transformer.learner_storage(), self._copies, strict=True):
            into.copy_(kept)
        self._transformer.repacked()
