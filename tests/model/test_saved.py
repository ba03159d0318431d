"""What a backward makes again of what is kept has the bits that the forward had, so gradients are
as if all were kept.

The second run is given what the forward had instead: the results of norms, gates, roundings and
attention's inputs are noted there, and handed out in the backward.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from isobit.kernels import Activation, KVStore, Layout
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter
from isobit.model.forward.kv_scales import KVScales
from isobit.model.forward.moe import RouteTape
from isobit.precision import QTensor
from tests.models import tiny_model

MADE_AGAIN = (
    "rms_norm",
    "rms_norm_quantized",
    "gate_mul",
    "gate_mul_quantized",
    "quantize",
    "attention_inputs",
)
FLOWS = [
    *(
        (flow, "qwen3")
        for flow in ("float32", "bf16", "fp8-unified", "fp8", "mxfp8", "nvfp4", "fp8-e2e")
    ),
    *((flow, "qwen3_moe") for flow in ("bf16", "fp8", "fp8-e2e")),
    ("fp8", "olmo2"),
    ("fp8", "gemma3_text"),
    ("fp8", "gemma4_text"),
    ("fp8", "gemma4_text-experts"),
    ("fp8", "gemma4_text-small"),
    ("fp8", "gpt_oss"),
    ("fp8", "qwen3_5_text"),
    ("fp8", "qwen3_5_moe_text"),
    ("fp8", "qwen3_next"),
    ("fp8", "glm4_moe"),
    ("fp8", "minimax_m2"),
    ("fp8", "deepseek_v3"),
    ("fp8", "nemotron_h"),
    ("fp8", "nemotron_h-latent"),
    ("fp8[query=e4m3]", "qwen2"),
    ("fp8", "olmo2"),
    ("fp8[kv_cache=e4m3-calibrated,query=e4m3-calibrated]", "qwen3"),
]


class Notes:
    """Wraps a backend's operators; `changed` changes what is handed out in a backward, for the
    control."""

    def __init__(self, operators: type, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: dict[tuple[object, ...], Any] = {}
        self.backward, self.keeps, self.changed, self.handed = False, False, False, 0
        self._inside = False
        for name in (
            *MADE_AGAIN,
            "quantize_along_tokens",
        ):  # the last quantizes under the name of another matrix
            monkeypatch.setattr(operators, name, self._wrapped(name, getattr(operators, name)))

    def _wrapped(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(ops: Any, *given: Any) -> Any:
            if self._inside or not self.keeps:
                return operator(ops, *given)
            self._inside = True
            try:
                key = _key(name, given)
                if self.backward and key in self.noted:
                    return self._hand_out(key, given)
                found = operator(ops, *given)
                if not self.backward and name in MADE_AGAIN and "queries" not in key:
                    self._note(ops, name, given, found)
                return found
            finally:
                self._inside = False

        return call

    def _note(self, ops: Any, name: str, given: Any, found: Any) -> None:
        self.noted[_key(name, given)] = (found, given[2]) if name == "attention_inputs" else found
        if name == "rms_norm_quantized":  # an own copy for WGrad is made of what was not quantized
            self.noted["rms_norm", given[1].data_ptr()] = ops.rms_norm(*given[:4])
        if name == "gate_mul_quantized":
            self.noted["gate_mul", given[1].data_ptr()] = ops.gate_mul(*given[:2])

    def _hand_out(self, key: tuple[object, ...], given: Any) -> Any:
        found = self.noted[key]
        self.handed += 1
        if key[0] == "attention_inputs":
            found, store = found
            _copy(store, given[2])
        if self.changed:
            first = found[0] if isinstance(found, tuple) else found
            data = first.data if isinstance(first, QTensor) else first
            data.view(torch.uint8).view(-1)[1] ^= 0x10
        return found


def _key(name: str, given: Any) -> tuple[object, ...]:
    """The operator and the matrix, the norm, or the input."""
    named = [one for one in given if isinstance(one, str) and one not in get_args(Activation)]
    return name, *(
        named or [given[1 if name.startswith(("rms_norm", "gate_mul")) else 0].data_ptr()]
    )


def _copy(store: KVStore, into: KVStore) -> None:
    for part in ("k", "v", "k_scale", "v_scale"):
        source, target = getattr(store, part), getattr(into, part)
        if (source is not None and not store.calibrated) or (
            source is not None and part in ("k", "v")
        ):
            target.copy_(source)


def gradients(model: Model, notes: Notes, recompute: Any = False) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    notes.noted.clear()
    notes.backward = False
    ids = torch.arange(45) * 7 % model.config.vocab_size
    tape = None if model.config.experts is None else RouteTape()
    hidden = model.transformer.hidden(
        ids, Layout.packed([9, 1, 35]), tape=tape, recompute=recompute
    )
    logprobs, _ = model.transformer.head_logprobs(hidden, ids.roll(1))
    notes.backward = True
    logprobs.sum().backward()
    return {name: p.grad for name, p in model.named_parameters().items() if p.grad is not None}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.int32), right[name].view(torch.int32)) for name in left
    )


@pytest.mark.parametrize("adapted", [False, True], ids=["all", "adapter"])
@pytest.mark.parametrize(("flow", "family"), FLOWS)
def test_gradients_are_those_of_a_forward_that_keeps_all(
    flow: str, family: str, adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: one bit of each, changed before it is handed out."""
    model = tiny_model(flow, family, hidden_size=144, intermediate_size=208, head_dim=36, scale=5.0)
    if adapted:
        model.save(tmp_path)
        given = NewAdapter(
            4,
            8.0,
            (
                *(("q_proj", "v_proj") if not model.config.latent else ("q_b_proj", "kv_b_proj")),
                "o_proj",
                *(["down_proj"] if model.config.experts is None else []),
            ),
        )
        model = Model.load(tmp_path, flow, consistency=model.ops.consistency, adapter=given)
        with torch.no_grad():
            for seed, parameter in enumerate(model.parameters()):  # with B = 0 A had no gradient
                parameter.add_(
                    0.1
                    * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                )
        model.sync()
    if model.precision.calibrated:
        model.transformer.calibrate(KVScales(torch.full((2, 3), 0.02), model.weights_version))
    notes = Notes(type(model.ops), monkeypatch)
    found = gradients(model, notes)
    assert all(same(gradients(model, notes, level), found) for level in ("mlp", True))
    notes.keeps = True
    assert same(gradients(model, notes), found)
    others = (model.config.experts is not None) + (model.config.linear is not None)
    assert notes.handed >= (6, 4, 3)[others if adapted else 0]
    notes.changed = True
    assert not same(gradients(model, notes), found)
