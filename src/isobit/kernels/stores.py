"""The stores of earlier rows: attention's keys and values by slot (`KVStore`), and linear
attention's state after these rows by page (`StateStore`). Left out: the ownership of pages
(`isobit.engine`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels.codes import decode
from isobit.precision import Format, QuantSpec


@dataclass(frozen=True, eq=False)
class KVStore:
    """Keys and values of one layer.

    k, v [slots, kv_heads, head_dim]: in the compute format; or codes, of E4M3 as uint8, of INT8 as
    int8 (`Format.stored`). k_scale, v_scale [slots, kv_heads] float32: one per token and head; or
    one for all, expanded over a single element, where scales are calibrated (`kv.granularity`
    tensor); or None. `counts` [2] int64 of a calibrated store: elements that its scales clamped,
    and elements written.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    kv: QuantSpec | None
    counts: Tensor | None = None

    @staticmethod
    def allocate(
        num_slots: int,
        kv_heads: int,
        head_dim: int,
        kv: QuantSpec | None,
        compute: Format,
        scales: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> "KVStore":
        """Return an empty store; `scales` [2] float32 are the calibrated ones of K and V, and may
        be set later."""
        shape = (num_slots, kv_heads, head_dim)
        dtype = kv.format.stored if kv is not None else compute.dtype
        k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if kv is None:
            return KVStore(k, v, None, None, None)
        if kv.granularity == "tensor":
            units = [torch.ones(1, 1, device=device).expand(shape[:2]) for _ in range(2)]
            store = KVStore(
                k, v, units[0], units[1], kv, torch.zeros(2, dtype=torch.int64, device=device)
            )
            if scales is not None:
                store.set_scales(scales)
            return store
        k_scale, v_scale = (torch.ones(shape[:2], device=device) for _ in range(2))
        return KVStore(k, v, k_scale, v_scale, kv)

    @property
    def calibrated(self) -> bool:
        """Whether one scale for K and one for V hold for the whole store."""
        return self.counts is not None

    def set_scales(self, scales: Tensor) -> None:
        """Set the calibrated scales [2] of K and V, and count from 0 again."""
        assert self.counts is not None
        assert self.k_scale is not None
        assert self.v_scale is not None
        self.k_scale.as_strided((1,), (1,)).copy_(scales[:1])
        self.v_scale.as_strided((1,), (1,)).copy_(scales[1:])
        self.counts.zero_()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the store: keys, values, their scales and counts."""
        return [
            t for t in (self.k, self.v, self.k_scale, self.v_scale, self.counts) if t is not None
        ]

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors if t is not self.counts)

    def by_page(self, page_size: int) -> list[Tensor]:
        """Return the tensors that belong to pages, each a view [pages, page_size, ...]."""
        scales = () if self.calibrated else (self.k_scale, self.v_scale)
        return [
            t.view(-1, page_size, *t.shape[1:]) for t in (self.k, self.v, *scales) if t is not None
        ]

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values at `slots` [...], dequantized: two float32 tensors [...,
        kv_heads, head_dim]."""
        return self._read(self.k, self.k_scale, slots), self._read(self.v, self.v_scale, slots)

    def _read(self, data: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
        picked = data[slots]
        if scale is None or self.kv is None:
            return picked.float()
        return decode(picked, self.kv.format.dtype, torch.float32) * scale[slots].unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class StateStore:
    """States of one layer of linear attention. The state after row p of a sequence is in the page
    of row p, where p is the last row of that page, or of the sequence so far: so a sequence that
    shares a full page finds the state after it there.

    inputs [pages, W - 1, C]: the last inputs of the convolution, in the compute format. states
    [pages, Hv, Dk, Dv] float32: of the delta rule.
    """

    inputs: Tensor
    states: Tensor
    calibrated = False
    counts = None

    @staticmethod
    def allocate(
        num_pages: int,
        inputs: tuple[int, int],
        state: tuple[int, int, int],
        compute: Format,
        device: torch.device | str,
    ) -> "StateStore":
        """Return an empty store for `inputs` (W - 1, C) and `state` (Hv, Dk, Dv)."""
        return StateStore(
            torch.zeros(num_pages, *inputs, dtype=compute.dtype, device=device),
            torch.zeros(num_pages, *state, device=device),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the store."""
        return [self.inputs, self.states]

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors)

    def by_page(self, page_size: int) -> list[Tensor]:
        """Return the tensors that belong to pages, each [pages, ...]."""
        return self.tensors


@dataclass(frozen=True)
class NoStore:
    """The store of a layer that keeps nothing of earlier rows: one that is only an MLP."""

    calibrated = False
    counts = None
    tensors: tuple[Tensor, ...] = ()
    nbytes: int = 0

    def by_page(self, page_size: int) -> list[Tensor]:
        """Return no tensors: nothing of this store belongs to pages."""
        return []


Store = KVStore | StateStore | NoStore
