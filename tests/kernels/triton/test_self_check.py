"""The check that a GPU must pass before it is used: it passes in the interpreter, and notices each
promise that is broken."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.kernels import KVStore, Layout
from isobit.kernels.attention.triton import forward as attention
from isobit.kernels.backends import self_check
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.product.triton import plan
from isobit.precision import QTensor
from tests.kernels.triton.helpers import DEVICE
from tests.models import slow_where


def _ops(**broken: Callable[..., Any]) -> TritonOps:
    ops = TritonOps("bitwise", "being checked", DEVICE)
    for name, operator in broken.items():
        setattr(ops, name, operator(getattr(ops, name)))
    return ops


@pytest.mark.slow
def test_the_kernels_pass() -> None:
    state = torch.get_rng_state()
    assert self_check.failures(_ops(), sizes=self_check.SMALL) == []
    assert torch.equal(torch.get_rng_state(), state), "the user's own random numbers stay"


def _few_rows_differ(operator: Callable[..., Any]) -> Callable[..., Any]:
    """As of a library that takes another instruction for few rows."""

    def call(*given: Any, **more: Any) -> Any:
        y, x = operator(*given, **more), next(one for one in given if not isinstance(one, str))
        if (x.data if isinstance(x, QTensor) else x).shape[0] >= 64:
            return y
        return (_changed(y[0]), *y[1:]) if isinstance(y, tuple) else _changed(y)

    return call


def _sums_of_few_rows_differ(operator: Callable[..., Any]) -> Callable[..., Any]:
    """By one bit, in the logarithms alone."""

    def call(*given: Any, **more: Any) -> Any:
        out, sums = operator(*given, **more)
        return out, sums if len(out) >= 64 else _changed(sums)

    return call


def _token_outside(operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        tokens, logprobs = operator(*given)
        return tokens + 500, logprobs

    return call


def _other_states(operator: Callable[..., Any]) -> Callable[..., Any]:
    """What is kept after some rows alone is not what the rows that follow would have found."""

    def call(*given: Any) -> Any:
        y = operator(*given)
        if int(given[-1].context[0]):
            given[-2].states.copy_(_changed(given[-2].states))
        return y

    return call


def _changed(x: Any) -> Any:
    """The lowest bit of each number, the other way."""
    if isinstance(x, QTensor):
        return QTensor(_changed(x.data), x.scale, x.spec)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return (x.view(kinds[x.element_size()]) ^ 1).view(x.dtype)


def _wrong(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The same for every batch, and not what it should be."""

    def call(*given: Any, **more: Any) -> Any:
        y = operator(*given, **more)
        return (y[0] * 1.03, *y[1:]) if isinstance(y, tuple) else y * 1.03

    return call


def _another_code(operator: Callable[..., Any]) -> Callable[..., Any]:
    """One code of the keys is the next one."""

    def call(store: KVStore, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> None:
        operator(store, k, v, layout)
        store.k[0, 0, 0] += 1

    return call


def _after_stored_rows(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Another result where a sequence goes on."""

    def call(*given: Any) -> Any:
        y, layout = operator(*given), next(one for one in given if isinstance(one, Layout))
        return _changed(y) if int(layout.context[0]) else y

    return call


def _quantized(ops: TritonOps) -> Any:
    return self_check._quantized(ops, self_check.SMALL.width)


def _delta(ops: TritonOps) -> Any:
    return self_check._recurrent(ops, self_check.SMALL.states, "delta rule")


def _mamba(ops: TritonOps) -> Any:
    return self_check._recurrent(ops, self_check.SMALL.states, "Mamba-2")


def _without_bias(operator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: operator(*given[:4])


def _without_skip(operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(qkv: Any, gates: Any, heads: Any, *rest: Any) -> Any:
        return operator(qkv, gates, replace(heads, skip=torch.zeros_like(heads.skip)), *rest)

    return call


LONG = ("attend", "quantize", "gate_mul_quantized", "delta_rule", "short_convolution")


@pytest.mark.parametrize(
    ("part", "broken"),
    slow_where(
        [
            (lambda ops: self_check._product(ops, "BF16", 64, 160), {"product": _few_rows_differ}),
            (lambda ops: self_check._product(ops, "FP8", 64, 160), {"product": _few_rows_differ}),
            (lambda ops: self_check._product(ops, "FP8", 64, 160), {"product": _wrong}),
            (lambda ops: self_check._attention(ops, "FP8", 70), {"attend": _few_rows_differ}),
            (
                lambda ops: self_check._attention(ops, "FP8", 70),
                {"attend": _sums_of_few_rows_differ},
            ),
            (lambda ops: self_check._attention(ops, "FP8", 70), {"attend": _wrong}),
            (lambda ops: self_check._attention(ops, "INT8", 70), {"kv_write": _another_code}),
            (self_check._head, {"head_logprobs": _few_rows_differ}),
            (self_check._head, {"head_logprobs": _wrong}),
            (self_check._head, {"head_sample": _token_outside}),
            (_quantized, {"rms_norm_quantized": _few_rows_differ}),
            (_quantized, {"gate_mul_quantized": _few_rows_differ}),
            (
                _quantized,
                {"quantize": lambda operator: lambda *given: _changed(operator(*given))},
            ),
            (_delta, {"short_convolution": _after_stored_rows}),
            (_delta, {"short_convolution": _wrong}),
            (_delta, {"delta_rule": _after_stored_rows}),
            (_delta, {"delta_rule": _wrong}),
            (_delta, {"delta_rule": _other_states}),
            (_mamba, {"short_convolution": _without_bias}),
            (_mamba, {"delta_rule": _after_stored_rows}),
            (_mamba, {"delta_rule": _without_skip}),
            (_mamba, {"delta_rule": _other_states}),
            (
                self_check._rounded,
                {
                    "round_stochastically": lambda operator: (
                        lambda *given: _changed(operator(*given))
                    )
                },
            ),
        ],
        lambda part, broken: next(iter(broken)) in LONG,
    ),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_hold_is_noticed(
    part: Callable[[TritonOps], Any], broken: dict[str, Any]
) -> None:
    """The control: what a GPU might do."""
    assert not all(holds for _, holds in part(_ops(**broken)))


def test_where_exchanged_operands_have_other_bits_all_rows_stand_on_one_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that is remembered too. The controls: where something else fails as well, or attention
    fails either way."""
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(attention, "_FEW_ROWS", attention._FEW_ROWS)  # put back at the end
    monkeypatch.setattr(plan, "_tokens_first", plan._tokens_first)
    other, wrong = "attention over keys in INT8: decoded rows have other bits", ["output head: off"]
    monkeypatch.setattr(
        self_check, "failures", lambda *given: [other, *wrong] if attention.keys_first() else []
    )
    ops = _ops()
    assert self_check.remembered(ops) == [other, "output head: off"]
    assert attention.keys_first()
    wrong.clear()
    assert self_check.remembered(ops) == []
    assert not attention.keys_first()
    assert [path.name.split(".", 1)[1] for path in (tmp_path / "gpu").iterdir()] == [
        "one-side.passed"
    ]
    monkeypatch.setattr(attention, "_FEW_ROWS", 32)
    monkeypatch.setattr(self_check, "failures", lambda *given: pytest.fail("it was asked again"))
    assert self_check.remembered(ops) == []
    assert not attention.keys_first()
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(attention, "_FEW_ROWS", 32)
    monkeypatch.setattr(self_check, "failures", lambda *given: [other])
    assert self_check.remembered(ops) == [other]


def test_only_a_pass_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path))
    results, asked = [["output head: off"], [], ["never asked"]], []
    monkeypatch.setattr(
        self_check, "failures", lambda *given: asked.append(given) or results[len(asked) - 1]
    )
    ops = _ops()
    assert self_check.remembered(ops) == ["output head: off"]
    assert self_check.remembered(ops, fp8=False) == []
    assert self_check.remembered(ops) == []
    assert [given[1] for given in asked] == [True, False]
    monkeypatch.setattr(self_check, "versions", lambda: {"torch": "another"})
    assert self_check.remembered(ops) == ["never asked"]
