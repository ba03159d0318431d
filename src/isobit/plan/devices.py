"""The numbers that the planner stands on: what devices can do, by their vendor, and which share of it software reaches.

Rates are dense, without sparsity. Links: what a GPU sends to others in a second, in one direction, as collectives reach
it. The factors are fitted to published times of other systems; `benchmarks/published.py` prints each point with its
error, and which points were fitted. Nothing was measured with isobit on a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from isobit.errors import IsobitError, did_you_mean
from isobit.plan.work import Rates

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Device:
    """A GPU: `memory` bytes that a program finds on it; operations and bytes a second; `link` to GPUs of the same
    machine and `network` to those of others, bytes a second and GPU. `source`: where the rates are from."""

    name: str
    memory: float
    bandwidth: float
    bf16: float
    fp8: float
    source: str
    link: float = 300e9
    network: float = 45e9


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("h100", 79.1 * GIB, 3.35e12, 989.4e12, 1978.9e12, "NVIDIA H100 SXM data sheet"),
        Device("h200", 139.8 * GIB, 4.8e12, 989.4e12, 1978.9e12, "NVIDIA H200 SXM data sheet"),
        Device("h20", 95.2 * GIB, 4.0e12, 148e12, 296e12, "NVIDIA H20 data sheet"),
        Device("b200", 178.3 * GIB, 8.0e12, 2250e12, 4500e12, "NVIDIA HGX B200 data sheet", link=600e9, network=90e9),
    )
}
"""`memory` is about what PyTorch reports of such a GPU. `link`: two thirds of the 450 GB/s of NVLink 4
in one direction (NVLink 5: of 900 GB/s); `network`: 90 % of one adapter of 400 Gb/s a GPU (B200: 800)."""


@dataclass(frozen=True)
class Factors:
    """The share of a device's rate that a kind of work reaches, and what it costs besides."""

    copy: float = 0.9
    """Of the memory's bandwidth. Measured: a copy on an H200, 4.3 of 4.8 TB/s (docs/gpu.md)."""
    products_bf16: float = 0.615
    """Of BF16 operations in linear layers over many tokens. Fitted: torchtitan, Llama-3.1-8B."""
    products_fp8: float = 0.444
    """Of FP8 operations in linear layers over many tokens. Fitted: torchtitan, Llama-3.1-8B, Float8."""
    experts: float = 0.407
    """Of the above and of the bandwidth, in the products of a mixture of experts. Fitted: NeMo RL, Qwen3-30B-A3B."""
    attention: float = 0.40
    """Of BF16 operations, over many tokens. Published: Triton's FlashAttention 2, 330 to 475 of 989 TFLOP/s (H100)."""
    cache_fp8: float = 0.85
    """Of the bandwidth, where keys and values in FP8 are decoded: 1.6 times BF16's speed. Assumed: others see less
    than the ratio of bytes, or nothing (FlashInfer, SGLang)."""
    layer_s: float = 3.0e-6
    """Seconds of a layer in a step of decoding besides bytes and operations. Fitted: Llama-8B, a captured step on an
    H100, 5.1 ms, taken for batch 1."""
    step_s: float = 12.0e-3
    """Seconds of a step of decoding for what is not on the GPU: scheduling, sampling, stopping. Fitted: NeMo RL,
    Llama-3.1-8B."""


FACTORS = Factors()


def device_named(name: str) -> Device:
    """The device. Raises IsobitError for another name, with those that are known."""
    if name.lower() not in DEVICES:
        hint = did_you_mean(name.lower(), list(DEVICES))
        known = "" if hint.startswith("known") else f"; known: {', '.join(DEVICES)}"
        raise IsobitError(f"--device {name!r}: unknown device; {hint}{known}")
    return DEVICES[name.lower()]


def rates(
    device: Device, factors: Factors = FACTORS, *, experts: bool = False, cache_fp8: bool = False
) -> dict[str, Rates]:
    """By kind of work (`work.py`), over many tokens or few: which of a rate and the bandwidth counts is the work's."""
    share = factors.experts if experts else 1.0
    bandwidth = factors.copy * device.bandwidth
    cache = bandwidth * (factors.cache_fp8 if cache_fp8 else 1.0)
    dense = Rates(bandwidth, factors.products_bf16 * device.bf16, factors.products_fp8 * device.fp8)
    return {
        "linear": Rates(share * bandwidth, share * dense.bf16, share * dense.fp8),
        "between": dense,
        "attention": Rates(cache, factors.attention * device.bf16, factors.attention * device.bf16),
        "head": dense,
        "optimizer": dense,
    }
