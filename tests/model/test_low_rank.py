"""Adapters on a frozen model: their arithmetic and gradients, and that nothing else changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.errors import Corruption, IsobitError
from isobit.kernels import Layout, Ops, get_ops, plain, tensors_of
from isobit.model import Experts, Model
from isobit.model.adapters.low_rank import product, update_norm
from isobit.model.adapters.targets import NewAdapter
from isobit.model.forward import autograd
from isobit.model.weights.stored import FROZEN, LowRank, Vector, Weight
from isobit.precision import E4M3, PackedFP4, QuantSpec, packed_fp4, quantize
from tests.models import require, tensor, tiny_model

ROWS, IN, OUT, RANK = 37, 96, 80, 4
SPEC = QuantSpec(E4M3, "1x128")
PARTS = ((0, 32), (48, 80))  # columns 32 to 48 have no adapter


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weight(dtype: torch.dtype, flow: str = "plain", zero: bool = False) -> Weight:
    """A frozen weight with two adapters; `flow` fp8: its product and DGrad in FP8 blocks."""

    def factor(name: str, *shape: int, seed: int) -> Weight:
        master = torch.nn.Parameter(_random(*shape, seed=seed) * 0.3)
        return Weight(name, master, master.detach().to(dtype), None, None)

    adapters = tuple(
        LowRank(
            factor("a", RANK, IN, seed=2 * i),
            factor("b", hi - lo, RANK, seed=2 * i + 1),
            lo,
            hi,
            2.0,
        )
        for i, (lo, hi) in enumerate(PARTS)
    )
    if zero:
        for one in adapters:
            tensor(one.b.working).zero_()
    values, bias = _random(OUT, IN, seed=9) * 0.1, _random(OUT, seed=10).to(dtype)
    if flow == "plain":
        return Weight("w", FROZEN, values.to(dtype), FROZEN, bias, adapters=adapters)
    working = quantize(values, QuantSpec(E4M3, "128x128"))
    return Weight("w", FROZEN, working, FROZEN, bias, SPEC, SPEC, "fp8", "fp8", adapters=adapters)


def _wanted(x: Tensor, weight: Weight) -> tuple[Tensor, list[Tensor]]:
    """(y, the factors as leaves), in float64, of rows x as they are multiplied."""
    values = plain(weight.working, torch.float32).double()
    y = x @ values.T + tensor(weight.bias).double()
    leaves, columns = [], list(y.split(1, 1))
    for one in weight.adapters:
        a, b = (tensor(f.working).double().requires_grad_() for f in (one.a, one.b))
        more = one.scale * ((x @ a.T) @ b.T)
        columns[one.lo : one.hi] = [
            column + each for column, each in zip(columns[one.lo : one.hi], more.split(1, 1))
        ]
        leaves += [a, b]
    return torch.cat(columns, 1), leaves


def _saved(result: Tensor) -> tuple[Tensor, ...]:
    """What a function of `autograd` keeps for its backward."""
    assert isinstance(result.grad_fn, torch.autograd.function.BackwardCFunction)
    return result.grad_fn.saved_tensors


def _near(found: Tensor, wanted: Tensor, relative: float) -> None:
    error = torch.linalg.vector_norm(found.double() - wanted) / torch.linalg.vector_norm(wanted)
    assert error < relative, error


CALLS: dict[str, tuple[int, Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "linear": (IN, lambda x, w, ops: autograd.linear(x, w, ops), lambda x: x),
    "gated": (
        2 * IN,
        lambda x, w, ops: autograd.gated_linear(x, "silu", w, ops),
        lambda x: torch.nn.functional.silu(x[:, :IN]) * x[:, IN:],
    ),
    "normed": (
        IN,
        lambda x, w, ops: autograd.norm_linear(
            x, None, Vector("n", FROZEN, torch.ones(IN, dtype=x.dtype)), 1e-6, w, ops
        )[0],
        lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_those_of_the_formula(ops: Ops, call: str) -> None:
    """In float32 against autograd in float64; the control leaves the scale out."""
    width, compute, before = CALLS[call]
    weight = _weight(torch.float32)
    x = _random(ROWS, width, seed=20)
    dy = _random(ROWS, OUT, seed=21)
    given, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y = compute(given, weight, ops)
    y.backward(dy)
    wanted, leaves = _wanted(before(exact), weight)
    wanted.backward(dy.double())
    _near(y.detach(), wanted.detach(), 1e-6)
    _near(tensor(given.grad), tensor(exact.grad), 1e-5)
    for one, (a, b) in zip(weight.adapters, zip(leaves[::2], leaves[1::2])):
        for factor, leaf in ((one.a, a), (one.b, b)):
            found, right = tensor(factor.master.grad), tensor(leaf.grad)
            assert found.dtype == torch.float32
            _near(found, right, 1e-5)
            with pytest.raises(AssertionError):
                _near(found / one.scale, right, 1e-5)
    assert weight.master.grad is None


def test_gradients_under_fp8_are_of_the_values_that_were_multiplied(ops: Ops) -> None:
    """A and B meet dequantized codes, so only codes are kept; dx goes through the FP8 DGrad. BF16
    rounds u, du and dx. The control takes the unquantized rows."""
    weight, x = _weight(torch.bfloat16, "fp8"), _random(ROWS, IN, seed=20).bfloat16()
    dy = _random(ROWS, OUT, seed=21).bfloat16()
    given = x.clone().requires_grad_()
    y = autograd.linear(given, weight, ops)
    kept = [saved for saved in _saved(y) if saved.shape[0] == ROWS and saved.shape[1] == IN]
    assert [saved.dtype for saved in kept] == [torch.float8_e4m3fn]
    y.backward(dy)

    def largest(rows: Tensor) -> float:
        wanted, leaves = _wanted(rows.double(), weight)
        wanted.backward(dy.double())
        right = [tensor(leaf.grad) for leaf in leaves]
        found = [tensor(f.master.grad) for one in weight.adapters for f in (one.a, one.b)]
        errors = [torch.linalg.vector_norm(g.double() - r) / r.norm() for g, r in zip(found, right)]
        return float(max(errors))

    assert largest(plain(quantize(x, SPEC), torch.float32)) < 4e-3
    assert largest(x) > 1e-2
    exact = torch.zeros(1)
    dgrad = (
        plain(quantize(dy, SPEC), torch.float32).double()
        @ plain(weight.working, torch.float32).double()
    )
    for one in weight.adapters:
        a, b = (tensor(factor.working).double() for factor in (one.a, one.b))
        exact = exact + one.scale * (dy[:, one.lo : one.hi].double() @ b) @ a
    _near(tensor(given.grad), dgrad + exact, 4e-3)


@pytest.mark.parametrize("flow", ["plain", "fp8"])
def test_the_bits_of_a_row_do_not_depend_on_its_batch(ops: Ops, flow: str) -> None:
    """The control: activations that share one scale."""
    weight, x = _weight(torch.bfloat16, flow), _random(ROWS, IN, seed=20).bfloat16()

    def rows(spec: QuantSpec | None, count: int) -> Tensor:
        operand = x[:count] if spec is None else quantize(x[:count], spec)
        return product(operand, weight, ops, torch.bfloat16)[0]

    spec = weight.activation
    whole = rows(spec, ROWS)
    for count in (1, 2, 17):
        assert torch.equal(rows(spec, count), whole[:count])
    shared = QuantSpec(E4M3, "tensor", "fp32")
    assert not torch.equal(rows(shared, 1), rows(shared, ROWS)[:1])


def _hidden(model: Model, use: str = "learner") -> Tensor:
    ids = torch.arange(3, 3 + 12) % model.config.vocab_size
    with torch.no_grad():
        return model.transformer.hidden(ids, Layout.packed([5, 7]), use=use).clone()


def _load(
    folder: Path, precision: str, backend: str = "native", family: str = "qwen3", **given: Any
) -> Model:
    """A tiny model on disk, loaded with a new adapter unless `adapter` is None."""
    if not (folder / family).is_dir():
        tiny_model(family=family, scale=4.0).save(folder / family)
    settings = {"adapter": NewAdapter(RANK, 8), "consistency": "bitwise", **given}
    return Model.load(folder / family, precision, backend, **settings)


def _trained(model: Model, seed: int = 1) -> Model:
    """With B other than zero, as after an update."""
    for number, (name, parameter) in enumerate(model.named_parameters().items()):
        if name.endswith("lora_B"):
            parameter.data.copy_(_random(*parameter.shape, seed=seed + number) * 0.2)
    model.sync()
    return model


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize(
    "precision", ["fp8", "fp8-unified", "bf16", "mxfp8", "nvfp4", "fp8-rollout"]
)
def test_a_new_adapter_leaves_the_bits_of_its_model(
    tmp_path: Path, precision: str, family: str
) -> None:
    """Of hidden states of both uses; with the adapter switched off those of the model without one.
    The control: an adapter after an update."""
    require("native")
    bare = _load(tmp_path, precision, family=family, adapter=None)
    model = _load(tmp_path, precision, family=family)
    for use in ("learner", "rollout"):
        assert torch.equal(_hidden(model, use), _hidden(bare, use))
    switched_off = model.without_adapter()
    _trained(model)
    for use in ("learner", "rollout"):
        assert not torch.equal(_hidden(model, use), _hidden(bare, use))
        assert torch.equal(_hidden(switched_off, use), _hidden(bare, use))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_new_adapter_leaves_the_bits_of_its_model_by_the_definition(
    tmp_path: Path, family: str
) -> None:
    """`tdp32-v1` by the reference backend, which the native one repeats, also with an adapter after
    an update, of experts too."""
    require("native")
    models = [_load(tmp_path, "fp8", backend, family=family) for backend in ("reference", "native")]
    bare = _load(tmp_path, "fp8", "reference", family=family, adapter=None)
    assert torch.equal(_hidden(models[0]), _hidden(bare))
    first, second = (_hidden(_trained(model)) for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, _hidden(_trained(models[1], seed=5)))  # the control


@pytest.mark.parametrize(("family", "count"), [("qwen3", 14), ("qwen3_moe", 8 + 2 * 5 * 3)])
def test_the_norm_of_the_update_is_that_of_the_products(
    tmp_path: Path, family: str, count: int
) -> None:
    """Of every matrix, experts' too. The control leaves one out."""
    model = _load(tmp_path, "fp8", family=family)
    adapters = [one for weight in model.transformer.rollout_weights() for one in weight.adapters]
    assert len(adapters) == count
    assert update_norm(adapters, model.ops) == 0
    _trained(model)
    products = [
        one.scale * tensor(one.b.working).double() @ tensor(one.a.working).double()
        for one in adapters
    ]
    wanted = float(torch.cat([each.flatten() for each in products]).norm())
    assert update_norm(adapters, model.ops) == pytest.approx(wanted, rel=1e-5)
    assert update_norm(adapters[1:], model.ops) != pytest.approx(wanted, rel=1e-5)


def _bits(model: Model, base: bool) -> dict[str, Tensor]:
    found = {}
    for name, operand in model.transformer.rollout_tensors():
        if ("lora" not in name) == base:
            codes = tensors_of(operand)[0]
            found[name] = (
                codes if isinstance(operand, Tensor) else codes.view(torch.uint8)
            ).clone()
    return found


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.parametrize("precision", ["fp8", "fp8-e2e"])
def test_masters_are_the_adapters_and_a_sync_makes_nothing_else(
    tmp_path: Path, precision: str
) -> None:
    model = _load(tmp_path, precision)
    count = sum(
        RANK * sum(shape)
        for shape in ((32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32))
    )
    assert {name.rpartition(".")[2] for name in model.named_parameters()} == {"lora_A", "lora_B"}
    assert model.memory()["masters"] == 4 * 2 * count
    frozen, factors = _bits(model, base=True), _bits(model, base=False)
    _trained(model)
    assert _same(_bits(model, base=True), frozen)
    assert not _same(_bits(model, base=False), factors)  # the control
    if not model.precision.shared:
        assert model.transformer.sync_bytes == 2 * 2 * count


def test_checksums_cover_the_frozen_weights_and_the_factors(tmp_path: Path) -> None:
    model = _load(tmp_path, "fp8")
    model.transformer.checksums.begin()
    model.transformer.checksums.compare()  # the control
    _trained(model)  # as does a sync
    model.transformer.checksums.compare()
    tensors = dict(model.transformer.rollout_tensors())
    for name in ("layers.1.o", "layers.0.q_proj.lora_A"):
        codes = tensors_of(tensors[name])[0].view(torch.uint8)
        codes[0, 0] ^= 1
        with pytest.raises(Corruption, match=name):
            model.transformer.checksums.compare()
        codes[0, 0] ^= 1


def test_the_frozen_working_weights_are_those_of_a_model_that_is_loaded_whole(
    tmp_path: Path,
) -> None:
    for family in ("qwen2", "qwen3_moe"):
        whole = _load(tmp_path, "fp8", family=family, adapter=None)
        assert _same(
            _bits(_load(tmp_path, "fp8", family=family), base=True), _bits(whole, base=True)
        )


BYTES = {
    "bf16": 2,
    "fp8": 1 + 4 / 128**2,
    "mxfp8": 1 + 4 / 32,
    "nvfp4": 4.5 / 8,
    "nvfp4[activation=bf16]": 4.5 / 8,
    "nvfp4-rollout": 4.5 / 8,
}
"""A weight's, of a frozen base's linear layers: codes and scales."""


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_frozen_base_takes_these_bytes(tmp_path: Path, family: str) -> None:
    """Counted in its storages. The control in NVFP4: where all weights are trained, a code takes a
    byte."""
    experts = {"experts": Experts(4, 2, 256)} if family == "qwen3_moe" else {}
    tiny_model(family=family, hidden_size=256, intermediate_size=256, **experts).save(
        tmp_path / family
    )

    def each(precision: str, **given: Any) -> float:
        model = _load(tmp_path, precision, family=family, **given)
        weights = [w for w in model.transformer.rollout_weights() if "lora" not in w.name]
        linear = [w for w in weights if not w.name.endswith("router")]
        if precision.startswith("nvfp4"):
            assert all(w.prepared is w.working for w in linear), "nothing is packed besides"
        taken = sum(t.numel() * t.element_size() for w in linear for t in tensors_of(w.working))
        return taken / sum(w.working.shape[0] * w.working.shape[1] for w in linear)

    for precision, wanted in BYTES.items():
        assert each(precision) == pytest.approx(wanted, rel=1e-2)
    assert each("nvfp4", adapter=None) == 1 + 4 / 16


@pytest.mark.parametrize("precision", ["nvfp4", "nvfp4[activation=bf16]"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_base_two_codes_to_a_byte_is_never_whole(
    tmp_path: Path, family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, whose gradients are those of a byte a code; the control exchanges the
    halves."""

    def gradients(model: Model) -> dict[str, Tensor]:
        ids = torch.arange(3, 15)
        hidden = _trained(model).transformer.hidden(ids, Layout.packed([5, 7]))
        model.transformer.head_logprobs(hidden, ids.roll(1))[0].sum().backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters().items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def whole(self: PackedFP4) -> Tensor:
        raise AssertionError(f"all of {self.shape} at once")

    with monkeypatch.context() as patch:
        patch.setattr(packed_fp4, "holds", lambda spec, shape: False)
        wanted = gradients(_load(tmp_path, precision, family=family))
    monkeypatch.setattr(PackedFP4, "dequantize", whole)
    model = _load(tmp_path, precision, family=family)
    assert _same(gradients(model), wanted)
    frozen = [
        w.working for w in model.transformer.rollout_weights() if isinstance(w.working, PackedFP4)
    ]
    assert len(frozen) >= 8
    for one in frozen:
        one.codes.copy_(one.codes << 4 | one.codes >> 4)
    for parameter in model.parameters():
        parameter.grad = None
    assert not _same(gradients(model), wanted)


def test_checksums_cover_all_of_nibbles(tmp_path: Path) -> None:
    model = _load(tmp_path, "nvfp4")
    model.transformer.checksums.begin()
    model.transformer.checksums.compare()  # the control
    found = dict(model.transformer.rollout_tensors())["layers.1.o"]
    for part in tensors_of(found):
        changed = part.view(torch.uint8).flatten()[:1]
        changed ^= 1
        with pytest.raises(Corruption, match=r"layers\.1\.o"):
            model.transformer.checksums.compare()
        changed ^= 1


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_recomputed_layers_have_the_same_gradients(tmp_path: Path, family: str) -> None:
    model = _trained(_load(tmp_path, "fp8", family=family))

    def gradients(recompute: bool) -> dict[str, Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        ids = torch.arange(3, 15)
        hidden = model.transformer.hidden(ids, Layout.packed([5, 7]), recompute=recompute)
        model.transformer.head_logprobs(hidden, ids.roll(1))[0].sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters().items()}

    kept, again = gradients(False), gradients(True)
    idle = {name for name, gradient in kept.items() if gradient is None}
    assert all(".experts." in name for name in idle)
    assert len(idle) < len(kept) / 3
    found = {name: gradient for name, gradient in kept.items() if name not in idle}
    assert all(bool(gradient.any()) for gradient in found.values())
    assert _same(found, {name: g for name, g in again.items() if g is not None})


def test_a_frozen_layer_without_adapters_keeps_nothing_for_its_weights() -> None:
    x = _random(ROWS, IN).bfloat16().requires_grad_()
    frozen = Weight("w", FROZEN, _random(OUT, IN).bfloat16(), None, None)
    ops = get_ops("reference", "exact")
    assert _saved(autograd.linear(x, frozen, ops)) == ()
    trained = Weight("w", torch.nn.Parameter(_random(OUT, IN)), frozen.prepared, None, None)
    assert len(_saved(autograd.linear(x, trained, ops))) == 1  # the control


def test_targets_choose_matrices(tmp_path: Path) -> None:
    model = _load(tmp_path, "bf16", adapter=NewAdapter(2, 4, ("v_proj", "down_proj")))
    assert list(model.named_parameters())[:4] == [
        f"layers.0.{name}.lora_{factor}" for name in ("v_proj", "down_proj") for factor in "AB"
    ]
    a, b = (model.named_parameters()[f"layers.1.v_proj.lora_{factor}"] for factor in "AB")
    assert (tuple(a.shape), tuple(b.shape)) == ((2, 32), (16, 2))
    assert bool((a.abs() <= 32**-0.5).all())
    assert not bool(b.any())
    for family, targets, line in (
        (
            "qwen3_moe",
            ("q_proj", "up_proj"),
            r"adapter\.targets: up_proj without gate_proj: of experts both have adapters",
        ),
        (
            "qwen3_moe",
            ("q_proj", "in_proj_qkv"),  # of linear attention, not of experts
            r"adapter\.targets: in_proj_qkv is no matrix of a qwen3_moe model; targets may be "
            r"q_proj",
        ),
        (
            "qwen3",
            ("out_proj",),
            r"adapter\.targets: out_proj is no matrix of a qwen3 model; targets may be q_proj",
        ),
    ):
        with pytest.raises(IsobitError, match=line):
            _load(tmp_path, "bf16", family=family, adapter=NewAdapter(2, 4, targets))


def test_a_model_with_an_adapter_has_no_masters_for_another_precision(tmp_path: Path) -> None:
    with pytest.raises(IsobitError, match="no masters to make weights of under another precision"):
        _load(tmp_path, "fp8").under("bf16")
    assert (
        _load(tmp_path, "fp8", adapter=None).under("bf16").precision.name == "bf16"
    )  # the control
