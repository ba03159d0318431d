"""An engine of a fleet whose memory is broken: keys lose a bit after they were written."""

from collections.abc import Callable
from typing import Any

import torch

from isobit.engine.fleet.worker import Worker

SIGN = 0x80


class FlippingWorker(Worker):
    """From the third version of the weights on, in every batch."""

    def open(self) -> bytes:
        found = super().open()
        operators = type(self._engine.model.ops)
        write: Callable[..., None] = operators.kv_write  # static
        transformer = self._engine.model.transformer

        def writing(store: Any, k: Any, v: Any, layout: Any) -> None:
            write(store, k, v, layout)
            if transformer.weights_version > 2:
                store.k.view(torch.uint8)[1::4] ^= SIGN

        operators.kv_write = staticmethod(writing)  # type: ignore[method-assign]
        return found
