"""Directories of weights: what is read, what is written, and one line for each defect."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.errors import IsobitError
from isobit.model import Model, ModelConfig, Tokenizer
from isobit.model.hub import names
from isobit.model.hub.checkpoint import read_json, read_weights, write_weights
from isobit.model.hub.shapes import parameter_shapes
from tests.models import ALPHABET

from .helpers import config, random_model

_TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5), "c": torch.full((4, 4), -1.5)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    random_model("float32").save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_read_into_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    write_weights(tmp_path, {name: tensor.to(dtype) for name, tensor in _TENSORS.items()})
    read = read_weights(tmp_path)
    assert set(read) == set(_TENSORS)
    for name, tensor in _TENSORS.items():
        assert read[name].dtype == torch.float32
        assert torch.equal(read[name], tensor)


def test_shards_have_an_index_and_hold_every_tensor_once(tmp_path: Path) -> None:
    write_weights(tmp_path, _TENSORS, shard_bytes=50)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (6 + 5 + 16)
    assert sorted(set(index["weight_map"].values())) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert not (tmp_path / "model.safetensors").exists()
    read = read_weights(tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in _TENSORS.items())


@pytest.mark.parametrize("first", [50, 1 << 30])
def test_weights_replace_those_of_the_other_form(tmp_path: Path, first: int) -> None:
    write_weights(tmp_path, _TENSORS, shard_bytes=first)
    changed = {name: tensor + 1 for name, tensor in _TENSORS.items()}
    write_weights(tmp_path, changed, shard_bytes=(1 << 30) if first == 50 else 50)
    read = read_weights(tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in changed.items())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fuse_is_the_inverse_of_split(family: str) -> None:
    given = config(family, tie_embeddings=family == "qwen3")
    masters = {name: torch.randn(shape) for name, shape in parameter_shapes(given).items()}
    tensors = {name: part.mine for name, part in names.split(masters, given).items()}
    assert "model.layers.2.self_attn.k_proj.weight" in tensors
    assert ("model.layers.0.self_attn.q_norm.weight" in tensors) == (family == "qwen3")
    assert ("model.layers.0.self_attn.v_proj.bias" in tensors) == (family == "qwen2")
    fused = names.fuse(lambda name, lo, hi: tensors[name][lo:hi], given)
    assert list(fused) == list(masters)
    assert all(torch.equal(fused[name], masters[name]) for name in masters)


def test_tensors_that_are_ignored(saved: Path) -> None:
    """Old checkpoints carry rotary frequencies; tied ones may carry the head a second time."""
    tensors = load_file(saved / "model.safetensors")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(18)}
    save_file(tensors | extra, saved / "model.safetensors")
    Model.load(saved, "float32", "reference")
    values = json.loads((saved / "config.json").read_text()) | {"tie_word_embeddings": True}
    (saved / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        IsobitError, match=r"lm_head.weight differs from the embedding.*tie_word_embeddings false"
    ):
        Model.load(saved, "float32", "reference")
    _edit(saved, {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert "head" not in Model.load(saved, "float32", "reference").named_parameters()


def _edit(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(path / "model.safetensors") | change
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors")


def _config(path: Path, **change: object) -> None:
    values = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps(values))


def _truncate(path: Path, size: int) -> None:
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:size])


_NORM = "model.norm.weight"
_DEFECTS = {
    "no config": (lambda p: (p / "config.json").unlink(), "config.json is missing"),
    "config not JSON": (
        lambda p: (p / "config.json").write_text('{\n "a": 1,,'),
        "config.json, line 2: not valid",
    ),
    "config a list": (
        lambda p: (p / "config.json").write_text("[]"),
        "expected a JSON object, got list",
    ),
    "config not text": (
        lambda p: (p / "config.json").write_bytes(b"\xff\xfe\x00"),
        "config.json: cannot be read",
    ),
    "architecture": (lambda p: _config(p, model_type="gpt2"), "unsupported architecture 'gpt2'"),
    "no weights": (
        lambda p: (p / "model.safetensors").unlink(),
        "no model.safetensors and no model.safetensors.index",
    ),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "truncated": (lambda p: _truncate(p, 5000), "truncated or corrupt safetensors"),
    "truncated header": (lambda p: _truncate(p, 5), "truncated or corrupt safetensors"),
    "empty": (lambda p: _truncate(p, 0), "truncated or corrupt safetensors"),
    "garbage": (
        lambda p: (p / "model.safetensors").write_bytes(b"\xff" * 4096),
        "truncated or corrupt safetensors",
    ),
    "missing tensor": (
        lambda p: _edit(p, {_NORM: None}),
        f"tensor {_NORM} is missing; config.json says llama",
    ),
    "unexpected tensor": (
        lambda p: _edit(p, {"extra.bias": torch.ones(2)}),
        "tensor extra.bias is not part of this",
    ),
    "shape": (
        lambda p: _edit(p, {_NORM: torch.ones(7)}),
        r"model.norm.weight has shape \(7,\).* asks for \(144,\)",
    ),
    "NaN": (
        lambda p: _edit(p, {_NORM: torch.full((144,), float("nan"))}),
        "model.norm.weight holds NaN or infinity",
    ),
    "infinity": (
        lambda p: _edit(p, {_NORM: torch.full((144,), float("inf"))}),
        "model.norm.weight holds NaN or inf",
    ),
    "dtype": (
        lambda p: _edit(p, {_NORM: torch.ones(144).char()}),
        "model.norm.weight has dtype torch.int8",
    ),
    "layers": (
        lambda p: _config(p, num_hidden_layers=4),
        r"tensor model.layers.3.* is missing \(and 8 more\)",
    ),
    "vocabulary": (
        lambda p: _config(p, vocab_size=60),
        r"embed_tokens.weight has shape .* asks for \(60, 144\)",
    ),
    "long tokenizer": (
        lambda p: Tokenizer.characters("".join(map(chr, range(0x400, 0x440)))).save(p),
        "the tokenizer has ids up to 66, but the model's vocabulary ends at 60",
    ),
    "eos": (
        lambda p: (p / "generation_config.json").write_text('{"eos_token_id": 61}'),
        "end-of-sequence id 61 is not in the model's vocabulary of 61",
    ),
    **{
        f"eos {token}, of config.json": (
            lambda p, token=token: _config(p, eos_token_id=[2, token]),
            f"config.json: eos_token_id {token} is not in the vocabulary: vocab_size is 61, so ids "
            "are from 0 to 60",
        )
        for token in (61, -1, 1 << 70)
    },
    **{
        f"eos {token}": (
            lambda p, token=token: (p / "generation_config.json").write_text(
                json.dumps({"eos_token_id": [2, token]})
            ),
            f"generation_config.json: eos_token_id: {token} is not a token id",
        )
        for token in (-1, 1 << 70)
    },
    "generation config": (
        lambda p: (p / "generation_config.json").write_text("{"),
        "generation_config.json, line 1",
    ),
}


@pytest.mark.parametrize("name", _DEFECTS)
def test_defects_of_a_directory_are_one_clear_line(saved: Path, name: str) -> None:
    damage, message = _DEFECTS[name]
    damage(saved)
    with pytest.raises(IsobitError, match=message) as caught:
        Model.load(saved, "float32", "reference")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(
        IsobitError, match="nowhere: no such directory; expected a Hugging Face model directory"
    ):
        Model.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "weight_map is missing or empty"),
        ({"weight_map": {"a": "../a.safetensors"}}, "names a file outside the directory"),
        (
            {"weight_map": {"a": "model-00009-of-00009.safetensors"}},
            "weight file model-00009.* is missing",
        ),
    ],
)
def test_defects_of_an_index(tmp_path: Path, index: dict, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(IsobitError, match=message):
        read_weights(tmp_path)


def test_read_json_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(IsobitError, match="cannot be read"):
        read_json(tmp_path)


def test_padded_vocabulary_is_fine(tmp_path: Path) -> None:
    """Qwen's embedding has more rows than its tokenizer has tokens."""
    Model.init(
        config(vocab_size=80), Tokenizer.characters(ALPHABET), "float32", 0, "reference"
    ).save(tmp_path)
    assert Model.load(tmp_path, "float32", "reference").config.vocab_size == 80


def test_only_what_transformers_can_express() -> None:
    with pytest.raises(AssertionError, match="no such biases and norms"):
        ModelConfig("llama", 8, 8, 8, 1, 1, 1, 8, qkv_bias=True)
