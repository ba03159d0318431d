"""`Model` against `transformers`: logits, greedy text, gradients, saved directories; and its own
interface."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import Layout
from isobit.model import Model, Tokenizer
from isobit.model.hub import names
from tests.models import ALPHABET, tensor

from .helpers import FAMILIES, config, directory, logits, oracle_logits, random_model, tokens

_TOLERANCE = 1e-4


def _tolerance(family: str) -> float:
    """A state of linear attention sums up what came before in float32, token by token here, in
    chunks there."""
    return 2e-4 if family.startswith(("qwen3.5", "qwen3-next", "nemotron")) else _TOLERANCE


# the reference backend where it is quick enough, the fastest one where a comparison needs many
# tokens
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_logits_and_greedy_text_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    theirs, path = directory(tmp_path, family)
    mine = Model.load(path, "float32", backend, "bitwise" if backend == "auto" else "exact")
    for length in (1, 40, 100):
        sequence = tokens(length)
        wanted = oracle_logits(theirs, sequence)
        given = logits(mine, sequence)
        assert float((given - wanted).abs().max()) <= _tolerance(family)
        assert torch.equal(given.argmax(-1), wanted.argmax(-1))
        assert float(wanted.std()) > 0.3  # the comparison is not of flat distributions


@pytest.mark.parametrize(
    ("family", "backend"), [*((name, "auto") for name in FAMILIES), ("qwen3", "reference")]
)
def test_gradients_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    theirs, path = directory(tmp_path, family)
    mine = Model.load(path, "float32", backend)
    sequences = [tokens(21, 1), tokens(34, 2)]
    weights = torch.randn(20 + 33, generator=torch.Generator().manual_seed(3))

    ids = torch.tensor([token for s in sequences for token in s[:-1]])
    targets = torch.tensor([token for s in sequences for token in s[1:]])
    hidden = mine.transformer.hidden(ids, Layout.packed([20, 33]))
    logprobs, _ = mine.transformer.head_logprobs(hidden, targets, 0.8, chunk=16)
    (logprobs * weights).sum().backward()

    parts = []
    for s in sequences:
        distribution = (theirs(torch.tensor([s[:-1]])).logits[0] / 0.8).log_softmax(-1)
        parts.append(distribution.gather(1, torch.tensor(s[1:]).unsqueeze(1)).squeeze(1))
    oracle = torch.cat(parts)
    torch.testing.assert_close(logprobs, oracle, rtol=0, atol=_TOLERANCE)
    (oracle * weights).sum().backward()
    gradients = per_expert(theirs, mine.config.family)
    wanted = names.fuse(lambda name, lo, hi: gradients[name][lo:hi], mine.config)
    for name, master in mine.named_parameters().items():
        if master.grad is None:  # an expert that no token chose, or a say in the choice alone
            assert ".experts." in name or name.endswith(("balance", "layer_scalar"))
            assert not wanted[name].any()
            continue
        error = (tensor(master.grad).double() - wanted[name].double()).norm() / wanted[
            name
        ].double().norm()
        limit = (
            5e-5 if name.endswith("router_bias") else 2e-5
        )  # sums over rows, much of which cancels
        limit = 5e-5 if family.startswith(("qwen3.5", "qwen3-next", "nemotron")) else limit
        # six layers, whose gradients meet in rows of keys: both are up to 3e-5 from float64
        limit = 8e-5 if family == "gemma4-small" else limit
        assert float(error) < limit, (name, float(error))


def per_expert(theirs: Any, family: str) -> dict[str, Tensor]:
    """Gradients by the names of the files: transformers holds the experts of a layer in one
    tensor."""
    found = {name: torch.zeros_like(buffer) for name, buffer in theirs.named_buffers()}
    mixtral = family in ("mixtral", "minimax_m2")
    parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    inside = "mixer" if family == "nemotron_h" else "mlp"
    block = "block_sparse_moe" if mixtral else inside
    balance = "mlp.e_score_correction_bias"  # of MiniMax-M2
    found = {name.replace(balance, f"{block}.{balance[4:]}"): x for name, x in found.items()}
    for name, parameter in theirs.named_parameters():
        base, _, kind = name.partition(f".{inside}.experts.")
        if not kind or family == "gpt_oss":
            found[name.replace(".mlp.gate.weight", f".{block}.gate.weight")] = parameter.grad
            continue
        for number, gradient in enumerate(parameter.grad.unbind(0)):
            pieces = gradient.chunk(2) if kind == "gate_up_proj" else (gradient,)
            own = parts[:2] if kind == "gate_up_proj" else parts[1:2] if "up" in kind else parts[2:]
            for part, piece in zip(own, pieces):
                found[f"{base}.{block}.experts.{number}.{part}.weight"] = piece
    return found


@pytest.mark.parametrize("preset", ["bf16", "fp8", "fp8-unified", "fp8-rollout"])
def test_low_precision_is_near_transformers(preset: str, tmp_path: Path) -> None:
    """And not equal to it: the preset is really in use."""
    theirs, path = directory(tmp_path, "qwen3")
    sequence = tokens(60)
    wanted = oracle_logits(theirs, sequence)
    error = logits(Model.load(path, preset), sequence, "rollout") - wanted
    relative = float(error.norm() / wanted.norm())
    assert 1e-4 < relative < (0.03 if preset == "bf16" else 0.3)


@pytest.mark.parametrize("preset", ["fp8", "bf16"])
def test_low_precision_gradients_point_the_same_way(preset: str) -> None:
    gradients = {}
    for precision in ("float32", preset):
        model = random_model(precision, "auto", "qwen3")
        ids = torch.tensor(tokens(100, 5))
        hidden = model.transformer.hidden(ids[:-1], Layout.packed([99]))
        model.transformer.head_logprobs(hidden, ids[1:])[0].mean().backward()
        gradients[precision] = torch.cat(
            [tensor(p.grad).flatten() for p in model.parameters()]
        ).double()
    cosine = torch.cosine_similarity(gradients["float32"], gradients[preset], 0)
    assert float(cosine) > (0.999 if preset == "bf16" else 0.95)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["single", "sharded"])
def test_a_saved_model_loads_in_transformers_as_it_is(
    family: str, form: str, tmp_path: Path
) -> None:
    theirs, path = directory(tmp_path / "theirs", family)
    mine, saved = Model.load(path, "fp8", "reference"), tmp_path / "mine"
    mine.save(saved, shard_bytes=30_000 if form == "sharded" else 1 << 30)
    assert (saved / "model.safetensors.index.json").exists() == (form == "sharded")
    again = transformers.AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager")
    assert type(again) is type(theirs)
    assert next(again.parameters()).dtype == torch.float32
    sequence = tokens(50)
    assert torch.equal(oracle_logits(again, sequence), oracle_logits(theirs, sequence))
    assert again.generation_config.eos_token_id == 2
    assert transformers.AutoTokenizer.from_pretrained(saved)("abc")[
        "input_ids"
    ] == mine.tokenizer.encode("abc")
    back = Model.load(saved, "fp8", "reference")
    assert back.config == mine.config
    for name, master in back.named_parameters().items():
        assert torch.equal(master, mine.named_parameters()[name])


def test_saving_in_bf16(tmp_path: Path) -> None:
    mine = random_model("float32")
    mine.save(tmp_path, torch.bfloat16)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert next(again.parameters()).dtype == torch.bfloat16
    back = Model.load(tmp_path, "float32", "reference")
    for name, master in back.named_parameters().items():
        assert torch.equal(master, mine.named_parameters()[name].bfloat16().float())


def test_the_generation_config_is_kept(tmp_path: Path) -> None:
    _, path = directory(tmp_path / "theirs", "llama")
    (path / "generation_config.json").write_text(
        '{"eos_token_id": [2, 5], "top_p": 0.8, "do_sample": true}'
    )
    model = Model.load(path, "float32", "reference")
    assert model.tokenizer.eos_ids == (2, 5)
    model.save(tmp_path / "mine")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine").generation_config
    assert (again.eos_token_id, again.top_p, again.do_sample) == ([2, 5], 0.8, True)


def test_stories(stories: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(stories).eval()
    mine = Model.load(stories, "float32")
    ids = mine.tokenizer.encode("Once upon a time, there was a little girl named Lily.")
    text = list(ids)
    for _ in range(24):
        text.append(int(logits(mine, text)[-1].argmax()))
    generated = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0].tolist()
    assert text == generated
    assert float((logits(mine, text) - oracle_logits(theirs, text)).abs().max()) <= _TOLERANCE
    wanted = oracle_logits(theirs, text[:-1]).log_softmax(-1)[
        torch.arange(len(text) - 1), torch.tensor(text[1:])
    ]
    torch.testing.assert_close(mine.logprobs([text])[0], wanted, rtol=0, atol=_TOLERANCE)
    low = Model.load(stories, "fp8").logprobs([text])[0]
    assert float((low - wanted).abs().mean()) < 0.1
    mine.save(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(oracle_logits(again, text), oracle_logits(theirs, text))


def test_logprobs_of_many_sequences() -> None:
    model = random_model("fp8", "auto")
    sequences = [tokens(n, n) for n in (5, 1, 2, 90, 33)]
    results = model.logprobs(sequences)
    assert [len(r) for r in results] == [4, 0, 1, 89, 32]
    assert all(r.dtype == torch.float32 and not r.requires_grad for r in results)
    for sequence, result in zip(sequences, results):
        assert torch.equal(model.logprobs([sequence])[0], result)
    assert model.logprobs([]) == []
    assert [len(r) for r in model.logprobs([[], [3]])] == [0, 0]


def test_logprobs_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("fp8", "auto")
    sequences = [tokens(n, n) for n in (30, 50, 7, 90, 33)]
    whole = model.logprobs(sequences)
    monkeypatch.setattr("isobit.model.forward.sequences._PASS_TOKENS", 60)
    assert all(torch.equal(a, b) for a, b in zip(model.logprobs(sequences), whole, strict=True))


def test_temperature_divides_the_logits() -> None:
    model, sequence = random_model("float32"), tokens(20)
    wanted = (logits(model, sequence)[:-1] / 0.5).log_softmax(-1)[
        torch.arange(19), torch.tensor(sequence[1:])
    ]
    torch.testing.assert_close(
        model.logprobs([sequence], temperature=0.5)[0], wanted, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([[3], [4, 61]], {}, "sequence 1: token id 61 is not in the model's vocabulary of 61"),
        ([[-1]], {}, "sequence 0: token id -1 is not in"),
        ([[3] * 129], {}, "sequence 0 has 129 tokens, more than the model's context of 128"),
        (
            [[3, 4]],
            {"temperature": 0.0},
            "temperature: log-probabilities need one above 0, got 0.0",
        ),
        ([[3, 4]], {"use": "teacher"}, "use: expected one of rollout, learner, got 'teacher'"),
    ],
)
def test_refused_logprobs(sequences: list[list[int]], options: dict, message: str) -> None:
    with pytest.raises(IsobitError, match=message):
        random_model("float32").logprobs(sequences, **options)


def test_init_is_a_function_of_the_seed() -> None:
    first, second, other = (
        Model.init(
            config(), Tokenizer.characters(ALPHABET), "bf16", seed, "reference"
        ).named_parameters()
        for seed in (7, 7, 8)
    )
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])
        assert parameter.ndim == 1 or not torch.equal(parameter, other[name])
    assert float(first["layers.0.qkv"].detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(first["layers.0.down"].detach().std()) == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert bool((first["layers.2.post_norm"] == 1).all())


def test_interface() -> None:
    model = random_model("fp8", "reference")
    assert model.weights_version == 1  # built, and synchronized once by the helper
    assert len(model.parameters()) == len(model.named_parameters())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert model.precision.name == "fp8"
    assert model.ops.backend == "reference"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp4"}, "unknown precision preset 'fp4'"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
        ({"consistency": "loose"}, "unknown consistency 'loose'"),
    ],
)
def test_refused_options(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(IsobitError, match=message):
        Model.load(tmp_path, **options)
