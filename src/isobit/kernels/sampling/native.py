"""Log-probabilities, sampled tokens and capped logits in C++ (`sampling.cpp`)."""

import torch
from torch import Tensor

from isobit.kernels.native.base import NativeBase
from isobit.kernels.ops import Temperature


def token_logprobs(
    ops: NativeBase, logits: Tensor, tokens: Tensor, temperature: Temperature
) -> tuple[Tensor, Tensor]:
    if logits.dtype != torch.float32:
        return ops.falls_back("token_logprobs", logits.dtype).token_logprobs(
            logits, tokens, temperature
        )
    logits, tokens = logits.contiguous(), tokens.contiguous()
    logprobs = torch.empty(logits.shape[0])
    entropy = torch.empty(logits.shape[0])
    each = _each(temperature)
    outside = ops.lib.isobit_token_logprobs(
        logits.data_ptr(), tokens.data_ptr(), *logits.shape, each.data_ptr(), int(each.ndim),
        logprobs.data_ptr(),
        entropy.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    assert not outside, f"a token is none of {logits.shape[1]}"
    return logprobs, entropy


def cap_logits(ops: NativeBase, logits: Tensor, cap: float) -> Tensor:
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    ops.lib.isobit_cap_logits(logits.data_ptr(), logits.numel(), cap, torch.get_num_threads())
    return logits


def sample(ops: NativeBase, logits: Tensor, keys: Tensor, temperature: Temperature) -> Tensor:
    if logits.dtype != torch.float32:
        return ops.falls_back("sample", logits.dtype).sample(logits, keys, temperature)
    logits, keys = logits.contiguous(), keys.contiguous()
    tokens, each = torch.empty(logits.shape[0], dtype=torch.int64), _each(temperature)
    ops.lib.isobit_sample(
        logits.data_ptr(), keys.data_ptr(), *logits.shape, each.data_ptr(), int(each.ndim),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return tokens


def _each(temperature: Temperature) -> Tensor:
    """Return the temperature as C++ reads it, one step of `ndim` numbers a row: one number for all
    rows, or one for each."""
    return (
        temperature.float().contiguous()
        if isinstance(temperature, Tensor)
        else torch.tensor(float(temperature))
    )
