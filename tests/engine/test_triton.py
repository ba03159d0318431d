"""What the engine records is what the learner computes, bit for bit, with the Triton kernels: in
the interpreter where there is no GPU. Real sizes: tests/gpu."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit import Completion, Engine, Model, Sampling
from isobit.kernels import get_ops
from isobit.model.adapters.targets import NewAdapter
from isobit.model.families.rope import Rope
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.hub.mamba import Mamba
from tests.models import tiny_model, trained_adapters

from .helpers import differing


def _model(precision: str, seed: int = 0) -> Model:
    return tiny_model(precision, seed=seed, backend="triton", num_layers=1, head_dim=16)


@lru_cache
def _sampled(precision: str) -> tuple[Model, list[list[Completion]]]:
    """A model and its completions: prompts of several lengths, in chunks, few pages."""
    model = _model(precision)
    return model, _completions(model)


def _completions(model: Model) -> list[list[Completion]]:
    assert get_ops("triton").backend == model.ops.backend == "triton"
    engine = Engine(model, kv_pages=7, page_size=4, max_batch_tokens=5, max_sequences=3)
    groups = engine.generate([[3, 4, 5, 6, 7, 8, 9], [5]], Sampling(2, 3, seed=1, ignore_eos=True))
    engine.integrity()
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "fp8-unified", "bf16", "fp8[kv_cache=e4m3]"])
def test_zero_bits_differ(precision: str) -> None:
    assert differing(*_sampled(precision)) == (0, 12)


@pytest.mark.slow
def test_other_weights_and_a_bf16_learner_differ() -> None:
    """The controls."""
    model, groups = _sampled("fp8")
    assert differing(_model("fp8", seed=1), groups)[0] > 0
    assert differing(model.under("bf16"), groups)[0] > 0


@pytest.mark.slow
def test_zero_bits_differ_with_heads_of_256_and_gelu() -> None:
    """A layer of Gemma 3 with heads of its size. Control: a learner whose scores are a little
    larger."""
    layer = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 256, "windows": (4,)}
    model = tiny_model("fp8", "gemma3_text", backend="triton", scale=6, **layer, query_scalar=256)
    groups = _completions(model)
    assert differing(model, groups) == (0, 12)
    model.transformer.config = replace(model.config, query_scalar=200)
    assert differing(model, groups)[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4_text", "gemma4_text-experts", "gemma4_text-small"])
def test_zero_bits_differ_with_heads_by_layer_and_capped_logits(family: str) -> None:
    """A layer of each kind of Gemma 4. Control: a learner with another cap."""
    model = tiny_model("fp8", family, backend="triton", scale=6, num_layers=2, head_dim=16)
    groups = _completions(model)
    assert differing(model, groups) == (0, 12)
    model.transformer.config = replace(model.config, logit_cap=5.0)
    assert differing(model, groups)[0] > 0


@pytest.mark.slow
def test_zero_bits_differ_with_linear_attention() -> None:
    """A layer of each kind of Qwen3.5. Control: a learner whose norms divide by more."""
    sizes = {"num_layers": 2, "head_dim": 16, "linear": LinearAttention((0,), 1, 2, 16, 16)}
    model = tiny_model("fp8", "qwen3_5_text", backend="triton", scale=6, **sizes)
    groups = _completions(model)
    assert differing(model, groups) == (0, 12)
    model.transformer.config = replace(model.config, rms_eps=1e-2)
    assert differing(model, groups)[0] > 0


_GROWN = Rope(
    300.0,
    "yarn",
    (("factor", 2.0), ("llama_4_scaling_beta", 0.5), ("original_max_position_embeddings", 4)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("phi3", {"windows": (4, 4)}),
        ("granite", {}),
        ("ministral3", {"rope": _GROWN}),
        ("deepseek_v3", {}),
        ("qwen3_5_moe_text", {"linear": LinearAttention((0,), 1, 2, 16, 16)}),
        ("nemotron_h", {"num_layers": 3, "linear": Mamba((1,), 1, 2, 16, 16, 4, 0.02)}),
        ("nemotron_h-latent", {"num_layers": 1}),
    ],
)
def test_zero_bits_differ_in_other_families(family: str, own: dict[str, Any]) -> None:
    """Two layers of each, and of Nemotron-H one of Mamba-2, of experts and of attention. Control: a
    learner whose norms divide by more."""
    sizes = {"num_layers": 2, **({} if family == "deepseek_v3" else {"head_dim": 16}), **own}
    model = tiny_model("fp8", family, backend="triton", scale=6, **sizes)
    groups = _completions(model)
    assert differing(model, groups) == (0, 12)
    model.transformer.config = replace(model.config, rms_eps=1e-2)
    assert differing(model, groups)[0] > 0


@pytest.mark.slow
def test_zero_bits_differ_with_sinks() -> None:
    """A layer of gpt-oss, with experts' biases and a window. Controls: a learner with other sinks,
    and other biases."""
    model = tiny_model(
        "fp8", "gpt_oss", backend="triton", scale=6, num_layers=1, head_dim=16, windows=(4,)
    )
    groups = _completions(model)
    assert differing(model, groups) == (0, 12)
    for role in ("sinks", "down_bias"):
        with torch.no_grad():
            for name, parameter in model.named_parameters().items():
                if name.endswith(role):
                    drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                    parameter.add_(0.5 * drawn.to(parameter.device))
        model.sync()
        assert differing(model, groups)[0] > 0
        groups = _completions(model)
        assert differing(model, groups) == (0, 12)


@pytest.mark.slow
def test_zero_bits_differ_under_a_window() -> None:
    """A layer of OLMo 3: a window, norms after attention and MLP, a norm over all heads. Control: a
    longer window."""
    layer = {"num_layers": 1, "head_dim": 16, "windows": (4,), "sliding_rope": Rope(300.0)}
    model = tiny_model("fp8", "olmo3", backend="triton", scale=6, **layer)
    groups = _completions(model)
    assert differing(model, groups) == (0, 12)
    model.transformer.config = replace(model.config, windows=(5,))
    assert differing(model, groups)[0] > 0


@pytest.mark.slow
def test_requests_of_several_adapters_have_the_bits_that_they_have_alone(tmp_path: Path) -> None:
    """In one batch, beside one of the base. The control: the other adapter alone."""
    tiny_model("bf16", "qwen3", scale=4, num_layers=1, head_dim=16).save(tmp_path / "base")
    adapters = {"a": NewAdapter(4, 8), "b": NewAdapter(3, 2, ["q_proj", "down_proj"])}
    trained_adapters(tmp_path, adapters)
    prompts, names, sampling = ["1+", "1+", "23"], ["a", "b", None], Sampling(1, 2, seed=5)

    def drawn(engine: Engine, which: list[int], names: list[str | None]) -> list[Any]:
        groups = engine.generate([prompts[i] for i in which], sampling, which, adapters=names)
        return [(c.token_ids, c.logprobs) for group in groups for c in group]

    model = Model.load(tmp_path / "base", "fp8", "triton").serving(
        {n: tmp_path / n for n in adapters}
    )
    together = drawn(Engine(model, page_size=4), [0, 1, 2], names)
    assert together[0] != together[1], "the control"
    for i, name in enumerate(names):
        given = None if name is None else tmp_path / name
        alone = Model.load(tmp_path / "base", "fp8", "triton", adapter=given)
        assert drawn(Engine(alone, page_size=4), [i], [None]) == together[i : i + 1]
