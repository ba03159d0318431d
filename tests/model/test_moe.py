"""Mixtures of experts: routing by its definition, rows that do not depend on their batch, replay,
and the same bits."""

from itertools import product
from pathlib import Path

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.kernels import Layout, get_ops
from isobit.model import Experts, Model, ModelConfig
from isobit.model.forward.moe import RouteTape, decode_routes, encode_routes, route
from isobit.precision import QTensor
from tests.models import slow_where, tensor

from .helpers import config, random_model, tokens

PRESETS = ["float32", "bf16", "fp8", "fp8-unified"]
BY_REFERENCE = [("fp8", "qwen3_moe"), ("bf16", "mixtral")]
"""What `make test` has of the reference operators, which take ten times as long."""
PROMPTS = [tokens(3, 1), tokens(17, 2), tokens(1, 3)]


@pytest.mark.parametrize("normalize", [False, True])
def test_the_gradients_of_routing_are_autograds(normalize: bool) -> None:
    """Of gates and of probabilities at once, with the experts chosen and with others given."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 12, generator=random)
    dp, dg = torch.randn(30, 12, generator=random), torch.randn(30, 5, generator=random)
    for given in (None, torch.stack([torch.randperm(12, generator=random)[:5] for _ in range(30)])):
        leaf = logits.clone().requires_grad_()
        probabilities, chosen, gates = route(leaf, 5, normalize, given, get_ops("reference"))
        ((probabilities * dp).sum() + (gates * dg).sum()).backward()
        other = logits.double().requires_grad_()
        p = torch.softmax(other, 1)
        picked = p.gather(1, chosen if given is None else given)
        picked = picked / picked.sum(1, keepdim=True) if normalize else picked
        ((p * dp).sum() + (picked * dg).sum()).backward()
        torch.testing.assert_close(leaf.grad, tensor(other.grad).float(), rtol=1e-5, atol=1e-6)


def test_a_tape_sums_the_probabilities_of_each_layer() -> None:
    tape = RouteTape()
    tape.follow(torch.full((4, 4), 0.25), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]))
    tape.follow(torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 4), torch.tensor([[0, 1]] * 4))
    torch.testing.assert_close(
        torch.stack(tape.probabilities), torch.tensor([[1.0] * 4, [2.8, 0.4, 0.4, 0.4]])
    )
    assert tape.routes().shape == (4, 2, 2)


@pytest.mark.parametrize(
    ("preset", "backend", "family"),
    slow_where(
        list(product(PRESETS, ["reference", "native"], ["qwen3_moe", "mixtral"])),
        lambda preset, backend, family: (
            backend == "reference" and (preset, family) not in BY_REFERENCE
        ),
    ),
)
def test_rollout_and_learner_agree_bit_for_bit(preset: str, backend: str, family: str) -> None:
    """Alone or beside others, in pieces, after preemption: an expert's row is the same. The control
    is below."""
    model = random_model(preset, backend, family)
    engine = Engine(model, kv_pages=14, page_size=4, max_batch_tokens=13, max_sequences=5)
    groups = engine.generate(
        PROMPTS, Sampling(n=4, max_new_tokens=14, seed=1), progress=lambda *_: engine.integrity()
    )
    assert engine.stats.preemptions > 0
    completions = [c for group in groups for c in group]
    found = model.logprobs([c.prompt_token_ids + c.token_ids for c in completions])
    assert all(row[-len(c.logprobs) :].tolist() == c.logprobs for row, c in zip(found, completions))


def test_control_other_routes_are_other_bits() -> None:
    model = random_model("fp8", "reference", "qwen3_moe")
    ids, layout = torch.tensor(tokens(30)), Layout.packed([30])
    tape = RouteTape()
    with torch.no_grad():
        plain = model.transformer.hidden(ids, layout, tape=tape)
        again = model.transformer.hidden(ids, layout, tape=RouteTape(tape.routes()))
        other = model.transformer.hidden(ids, layout, tape=RouteTape((tape.routes() + 1) % 6))
    assert torch.equal(plain, again)
    assert not torch.equal(plain, other)


@pytest.mark.slow
def test_the_engine_records_what_the_learner_would_choose() -> None:
    model = random_model("fp8", "reference", "qwen3_moe")
    engine = Engine(model, kv_pages=14, page_size=4, max_batch_tokens=13, max_sequences=5)
    assert engine.generate(PROMPTS, Sampling(max_new_tokens=2))[0][0].routes is None
    engine.record_routes = True
    groups = engine.generate(PROMPTS, Sampling(n=4, max_new_tokens=14, seed=1))
    assert engine.stats.preemptions > 0
    for completion in (c for group in groups for c in group):
        ids = (completion.prompt_token_ids + completion.token_ids)[:-1]
        tape = RouteTape()
        with torch.no_grad():
            model.transformer.hidden(torch.tensor(ids), Layout.packed([len(ids)]), tape=tape)
        assert completion.routes is not None
        recorded = decode_routes(completion.routes, 3, 3)
        assert torch.equal(recorded, tape.routes())
        assert encode_routes(recorded.numpy()) == completion.routes


def test_the_router_stays_in_fp32_and_every_expert_is_quantized() -> None:
    model = random_model("fp8-rollout", "reference", "qwen3_moe")
    stored = {name: operand for name, operand, _ in model.transformer._working["rollout"].tensors()}
    assert tensor(stored["layers.1.router"]).dtype == torch.float32
    for layer in range(3):
        for expert in range(6):
            assert isinstance(stored[f"layers.{layer}.experts.{expert}.gate_up"], QTensor)
            assert isinstance(stored[f"layers.{layer}.experts.{expert}.down"], QTensor)


def test_an_expert_that_nobody_chose_has_no_gradient() -> None:
    model = random_model("fp8", "reference", "qwen3_moe")
    routes = torch.tensor([0, 1, 2]).expand(9, 3, 3)
    hidden = model.transformer.hidden(
        torch.tensor(tokens(9)), Layout.packed([9]), tape=RouteTape(routes)
    )
    hidden.float().sum().backward()
    parameters = model.named_parameters()
    assert parameters["layers.0.experts.0.down"].grad is not None
    assert parameters["layers.0.experts.5.down"].grad is None
    assert float(tensor(parameters["layers.0.router"].grad).abs().sum()) > 0  # through the gates


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_config_json_round_trip(family: str) -> None:
    given = config(family, rms_eps=1e-5)
    assert ModelConfig.from_hf(given.to_hf()) == given


def test_older_names_sparse_steps_and_impossible_numbers() -> None:
    values = config("qwen3_moe").to_hf()
    values["num_experts"] = values.pop("num_local_experts")
    values |= {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    read = ModelConfig.from_hf(values)
    assert read.experts == Experts(6, 3, 40, True, (0, 1, 2))
    assert read.num_mixtures == 0
    with pytest.raises(IsobitError, match="7 experts per token, of 6"):
        ModelConfig.from_hf(values | {"num_experts_per_tok": 7})
    with pytest.raises(IsobitError, match="moe_intermediate_size has the wrong type"):
        ModelConfig.from_hf(values | {"moe_intermediate_size": None})


def test_a_saved_mixture_loads_again(tmp_path: Path) -> None:
    model = random_model("fp8", "reference", "mixtral")
    model.save(tmp_path)
    again = Model.load(tmp_path, "fp8", "reference")
    for name, parameter in model.named_parameters().items():
        assert torch.equal(parameter, again.named_parameters()[name])
