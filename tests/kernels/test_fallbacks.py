"""What C++ leaves to the reference operators is said before it happens, and has the reference's
bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore, Layout, Ops, get_ops
from isobit.kernels.backends.native import NativeOps, unsupported
from isobit.kernels.native import available
from isobit.precision import PRESETS, Flow, Precision, QTensor, precision_from
from tests.kernels.helpers import same

pytestmark = pytest.mark.skipif(not available()[0], reason=f"native backend: {available()[1]}")

FLOWS: dict[str, Precision] = {
    **PRESETS,
    "1x32 fp32": precision_from(
        {"preset": "fp8", "activation_granularity": "1x32", "activation_scale": "fp32"}
    ),
    "gradients in e5m2": precision_from({"preset": "fp8", "gradient_format": "e5m2"}),
    "int8 cache": precision_from({"preset": "fp8", "kv_cache": "int8"}),
}
LEFT = {
    "fp8-rollout-kv": {"kv_write"},
    "fp8-rollout-kv-verl": {"kv_write"},
    "fp8-rollout-attention": {"kv_write"},
    "nvfp4": {"quantize", "product"},
    "1x32 fp32": {"product"},
    "gradients in e5m2": {"quantize"},
}
"""Operators that the reference computes under `bitwise`; of flows that are not here, none."""


def operators(texts: list[str]) -> set[str]:
    return {text.split(" of ")[0] for text in texts}


def computed(ops: Ops, flow: Flow, precision: Precision) -> list[Tensor]:
    """Each quantizer, product and cache of a flow, once."""
    random = torch.Generator().manual_seed(1)
    x, weight, dy = (
        torch.randn(*size, generator=random) for size in ((9, 256), (40, 256), (9, 40))
    )
    x, weight, dy = x.bfloat16(), weight.bfloat16(), dy.bfloat16()
    a = x if flow.activation is None else ops.quantize(x, flow.activation)
    b = weight if flow.weight is None else ops.quantize(weight, flow.weight)
    alike = isinstance(a, QTensor) == isinstance(b, QTensor)
    results = [ops.product(a, b, None, torch.float32)] if alike else []
    if precision.gradient is not None and isinstance(b, QTensor):
        gradient = ops.quantize(dy, precision.gradient)
        results += [gradient.data, ops.gradient_product(gradient, b.transpose(), torch.bfloat16)]
    layout = Layout.packed([9])
    store = KVStore.allocate(layout.num_slots, 2, 32, flow.kv, flow.compute)
    rows = torch.randn(3, 9, 2, 32, generator=random).to(flow.compute.dtype)
    ops.kv_write(store, rows[1], rows[2], layout)
    results += [*store.tensors, *ops.attention(rows[0], store, layout, 0.2)]
    return [part.contiguous().view(torch.uint8) for part in results]


@pytest.mark.parametrize("name", FLOWS)
def test_what_the_reference_computes_is_said_before(name: str) -> None:
    """By operator, and all of it; with the bits of the reference backend."""
    precision = FLOWS[name]
    ops, reference = NativeOps("bitwise", "native backend"), get_ops("reference")
    ops.check_precision(precision)
    said = operators(unsupported(precision, ops.consistency))
    for flow in (precision.rollout, precision.learner):
        found, wanted = (computed(each, flow, precision) for each in (ops, reference))
        assert all(map(same, found, wanted))
    assert {operator for operator, _ in ops.fallbacks} <= said
    assert LEFT.get(name, set()) <= said
    if name in LEFT:
        assert {operator for operator, _ in ops.fallbacks} >= LEFT[name]
        assert ops.why.startswith("native backend; by the reference operators, which are slower: ")
    if not said:
        assert ops.why == "native backend"


def test_what_is_said_of_another_flow_does_not_cover_it() -> None:
    """The control: a flow that leaves products to the reference, after one that leaves nothing."""
    ops, odd = NativeOps(), FLOWS["1x32 fp32"]
    ops.check_precision(PRESETS["fp8"])
    computed(ops, odd.learner, odd)
    assert not {operator for operator, _ in ops.fallbacks} <= operators(
        unsupported(PRESETS["fp8"], ops.consistency)
    )


def test_it_is_said_again_of_the_next_model() -> None:
    ops = NativeOps("bitwise", "native backend")
    ops.check_precision(FLOWS["1x32 fp32"])
    assert "product of e4m3 1x32 fp32 by e4m3 128x128" in ops.why
    ops.check_precision(replace(PRESETS["fp8"]))
    assert ops.why == "native backend"
