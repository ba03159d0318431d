"""Layers that read the keys and values of others, and layers with embeddings of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import IsobitError
from isobit.kernels import KVStore, Layout, Ops, Watching
from isobit.model import Model, ModelConfig
from isobit.model.hub.names import parts
from isobit.model.hub.shapes import parameter_shapes
from tests.models import tiny_model

from .helpers import directory, oracle, tokens


class _Written(Watching):
    """Notes whether writing a layer's keys and values changes what its store holds."""

    def __init__(self, ops: Ops, layer: int, found: list[tuple[int, bool]]) -> None:
        super().__init__(ops)
        self._layer, self._found = layer, found

    def attention_inputs(self, qkv: Any, heads: Any, store: KVStore, layout: Layout) -> Any:
        before = [tensor.clone() for tensor in store.tensors]
        result = self._ops.attention_inputs(qkv, heads, store, layout)
        same = all(
            torch.equal(old.view(torch.uint8), new.view(torch.uint8))
            for old, new in zip(before, store.tensors)
        )
        self._found.append((self._layer, same))
        return result


@pytest.mark.parametrize("precision", ["fp8", "fp8[bf16_last_layers=2]", "bf16"])
def test_a_reader_writes_what_is_there(precision: str) -> None:
    """In prefill and in decoding, also where the reader's own flow has another cache. The control:
    its source changes the store."""
    model = tiny_model(precision, "gemma4_text-small", scale=4)
    found: list[tuple[int, bool]] = []

    def watch(ops: Ops, layer: int | None) -> Any:
        return ops if layer is None else _Written(ops, layer, found)

    with model.transformer.watched(watch, "rollout"):
        engine = Engine(model, kv_pages=32, page_size=4, cuda_graphs=False)
        engine.generate(["12+34=", "7*8="], Sampling(n=2, max_new_tokens=6, ignore_eos=True))
    assert len(engine.stores) == model.config.num_stores == 2
    assert {layer for layer, _ in found} == {0, 1, 2, 3}
    assert all(same for layer, same in found if layer >= 2)
    assert not any(same for layer, same in found if layer < 2)


def test_which_layer_is_read() -> None:
    """The last of the kind that has keys of its own, as transformers has it."""
    theirs = oracle("gemma4-small").config
    config = ModelConfig.from_hf(theirs.to_dict())
    assert [config.keys_of(layer) for layer in range(6)] == [0, 1, 2, 1, 2, 1]
    assert [config.is_read(layer) for layer in range(6)] == [False, True, True, False, False, False]
    assert theirs.kv_sharing_modes == [None, "store", "store", "reuse", "reuse", "reuse"]
    assert [config.inner_of(layer) for layer in range(6)] == [80, 80, 80, 160, 160, 160]
    names = parameter_shapes(config)
    assert "layers.2.k_norm" in names
    assert "layers.3.k_norm" not in names
    assert [name for name, _ in dict(parts(config))["layers.3.qkv"]] == [
        "model.layers.3.self_attn.q_proj.weight"
    ]


def test_published_keys_of_readers_are_not_read(tmp_path: Path) -> None:
    """Files have them, and transformers takes none of them. The control: of a layer that has keys
    of its own, one more tensor is refused."""
    _, path = directory(tmp_path, "gemma4-small")
    tensors = load_file(path / "model.safetensors")
    wanted = Model.load(path, "float32").logprobs([tokens(20)])[0]
    for name in ("k_proj", "v_proj", "k_norm"):
        own = tensors[f"model.layers.2.self_attn.{name}.weight"]
        tensors[f"model.layers.4.self_attn.{name}.weight"] = torch.zeros_like(own)
    save_file(tensors, path / "model.safetensors")
    assert torch.equal(Model.load(path, "float32").logprobs([tokens(20)])[0], wanted)
    tensors["model.layers.2.self_attn.k_norm.bias"] = torch.zeros(20)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(IsobitError, match="is not part of this architecture"):
        Model.load(path, "float32")


@pytest.mark.parametrize("name", ["embed_layers", "project_layers", "layers.3.embedded_gate"])
def test_each_part_of_the_embeddings_matters(name: str, tmp_path: Path) -> None:
    """The control of the comparisons with transformers: with its rows in another order,
    other numbers."""
    _, path = directory(tmp_path, "gemma4-small")
    model = Model.load(path, "float32")
    before = model.logprobs([tokens(20)])[0]
    with torch.no_grad():
        parameter = model.named_parameters()[name]
        parameter.copy_(parameter.flip(0))
    model.sync()
    assert float((model.logprobs([tokens(20)])[0] - before).abs().max()) > 1e-3
