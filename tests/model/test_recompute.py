"""Activation checkpointing: the bits of results and gradients without it, less memory, and nothing
told twice."""

from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.kernels import KVStore, Layout
from isobit.model import Model
from isobit.model.forward.kv_scales import AmaxRecorder, KVScales
from isobit.model.forward.moe import RouteTape

from .helpers import random_model, tokens

LENGTHS = [9, 1, 20]
CASES = [
    ("bf16", "qwen3"),
    ("fp8", "llama"),
    ("fp8", "qwen3_moe"),
    ("fp8", "qwen3_5_moe_text"),
    ("fp8", "qwen3_next"),
    ("fp8", "minimax_m2"),
    ("fp8", "deepseek_v3"),
    ("fp8", "gemma4_text-experts"),
    ("fp8", "gemma4_text-small"),
    ("fp8", "nemotron_h"),
    ("fp8", "nemotron_h-latent"),
    ("fp8[kv_cache=e4m3-calibrated]", "qwen2"),
]


def scaled(model: Model) -> Model:
    if model.precision.calibrated:
        scales = torch.full((model.config.num_layers, 2), 0.02)
        model.transformer.calibrate(KVScales(scales, model.weights_version))
    return model


def run(model: Model, recompute: bool, given: Tensor | None = None) -> dict[str, Any]:
    """Forward and backward, and everything that can be seen of them."""
    transformer = model.transformer
    recorder = AmaxRecorder(model.config.num_layers)
    for parameter in model.parameters():
        parameter.grad = None
    tape = RouteTape(given) if model.config.experts is not None else None
    ids = torch.tensor(tokens(sum(LENGTHS)))
    with transformer.watched(recorder):
        hidden = transformer.hidden(ids, Layout.packed(LENGTHS), tape=tape, recompute=recompute)
    logprobs, _ = transformer.head_logprobs(hidden, ids.roll(1))
    loss = logprobs.sum()
    if tape is not None:
        each = torch.stack(tape.probabilities)
        loss = loss + (each * torch.arange(1.0, 1.0 + each.shape[1])).sum()
    loss.backward()
    found = {"loss": loss.detach(), "hidden": hidden.detach(), "amax": recorder.amax(100.0)}
    found |= {name: p.grad for name, p in model.named_parameters().items() if p.grad is not None}
    found |= (
        {}
        if tape is None
        else {"routes": tape.routes(), "probabilities": torch.stack(tape.probabilities).detach()}
    )
    return found | {"forwards": torch.tensor(len(recorder.batches))}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.float().contiguous().view(torch.int32)

    return left.keys() == right.keys() and all(
        torch.equal(bits(left[name]), bits(right[name])) for name in left
    )


@pytest.mark.parametrize(("precision", "family"), CASES)
def test_results_and_gradients_have_the_bits_of_a_forward_that_keeps_all(
    precision: str, family: str
) -> None:
    model = scaled(random_model(precision, family=family, num_layers=2))
    wanted, found = run(model, False), run(model, True)
    assert "layers.1.o" in wanted
    assert same(found, wanted)
    with torch.no_grad():  # the control: another weight
        model.named_parameters()["layers.1.o"][0, 0] += 1
    model.sync()
    assert not same(run(scaled(model), True), wanted)


def test_routes_that_are_given_are_taken_again() -> None:
    model = random_model("bf16", family="qwen3_moe", num_layers=2)
    own = run(model, False)["routes"]
    given = (own + 1) % 6
    wanted = run(model, False, given)
    assert same(run(model, True, given), wanted)
    assert not same(run(model, True), wanted)


def test_an_expert_that_no_token_chose_has_no_gradient() -> None:
    model = random_model("bf16", family="qwen3_moe", num_layers=2)
    given = torch.tensor([0, 1, 2]).expand(sum(LENGTHS), model.config.num_layers, 3)
    found = run(model, True, given)
    assert same(found, run(model, False, given))
    assert "layers.1.experts.2.down" in found
    assert "layers.1.experts.5.down" not in found


def test_nothing_is_recomputed_where_nothing_will_go_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, written = random_model("fp8"), []
    write = type(model.ops).kv_write

    def counted(*arguments: Any) -> None:
        written.append(1)
        write(*arguments)

    monkeypatch.setattr(type(model.ops), "kv_write", staticmethod(counted))
    layers = model.config.num_layers
    run(model, False)
    assert len(written) == 2 * layers  # keys and values are made again in any case
    run(model, True)
    assert len(written) == 5 * layers  # a forward, one again, and what its backward makes again
    with torch.no_grad():
        model.transformer.hidden(torch.tensor(tokens(9)), Layout.packed([9]), recompute=True)
    assert len(written) == 6 * layers


@pytest.mark.parametrize("recompute", [False, True])
def test_keys_and_values_do_not_outlive_the_forward(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no tensors that autograd saves, but attention's backward reads them; the control
    holds them."""
    import gc
    import weakref

    made: list[weakref.ref[Any]] = []
    held: list[KVStore] | None = None
    allocate = KVStore.allocate

    def counted(*arguments: Any) -> KVStore:
        store = allocate(*arguments)
        made.append(weakref.ref(store))
        if held is not None:
            held.append(store)
        return store

    monkeypatch.setattr(KVStore, "allocate", staticmethod(counted))
    model = random_model("fp8")
    for held in (None, []):
        made.clear()
        hidden = model.transformer.hidden(
            torch.tensor(tokens(20)), Layout.packed([20]), recompute=recompute
        )
        gc.collect()
        assert len(made) == model.config.num_layers
        assert sum(store() is not None for store in made) == (0 if held is None else len(made))
        del hidden


def saved_bytes(model: Model, length: int, recompute: bool = False) -> int:
    """Bytes of what autograd keeps of one sequence's forward; parameters, keys and values
    excluded."""
    seen: dict[int, int] = {}
    own = {p.data_ptr() for p in model.parameters()}

    def count(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.zeros(length, dtype=torch.int64)
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
    ):
        hidden = model.transformer.hidden(ids, Layout.packed([length]), recompute=recompute)
    del hidden
    return sum(seen.values())


@pytest.mark.parametrize("preset", ["bf16", "fp8", "fp8-e2e"])
def test_what_a_token_keeps_worked_out_by_hand(preset: str) -> None:
    """The residual stream, qkv, the attention's result and gate and up, in BF16; with checkpointing
    the layer's inputs."""
    model = random_model(preset, family="llama")
    config = model.config
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads
    norm = 2 * hidden + 4  # the residual stream and its inverse deviation
    attention = (
        2 * config.qkv_rows(0) + 2 * heads * config.head_dim + 4 * heads
    )  # qkv, the result, log-sum-exp
    layer = norm + attention + norm + 4 * inner
    outside = 8 + norm + 2 * hidden / 64  # the token, the last norm, and its weight over 64 tokens
    layers = config.num_layers
    assert saved_bytes(model, 64) / 64 == layers * layer + outside
    inputs = 2 * hidden * (1 + 2 * (layers - 1))  # the first layer has no residual stream yet
    assert saved_bytes(model, 64, recompute=True) / 64 == inputs + outside
