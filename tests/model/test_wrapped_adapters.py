"""Adapters of models around a language model, in transformers and PEFT by the names of the base's
own class: what isobit trained is applied there; other names are refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter
from isobit.model.families import FAMILIES
from isobit.training.commands.export import export
from tests.distributed.threads import run

from .helpers import directory, logits, tokens
from .test_wrapped import PUBLISHED, published

_OPENED = [transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM]
_OLD, _NEW = "base_model.model.model.layers.", "base_model.model.model.language_model.layers."


def _adapted(base: Path, folder: Path, targets: tuple[str, ...] = ("all-linear",)) -> Model:
    """A model with an adapter that moves its logits, whose folder is written."""
    model = Model.load(base, "float32", adapter=NewAdapter(3, 6.0, targets))
    for number, parameter in enumerate(model.parameters()):
        noise = torch.Generator().manual_seed(number)
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
    model.sync()
    model.save(folder)
    return model


@torch.no_grad()
def _theirs(model: Any, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0].float()


def test_every_wrapper_is_tried() -> None:
    tried = {name.partition("-")[0] for name in PUBLISHED}
    assert tried == {name for family in FAMILIES.values() for name in family.wrappers}


@pytest.mark.parametrize("name", PUBLISHED)
def test_peft_applies_the_adapter_of_a_model_that_sees(name: str, tmp_path: Path) -> None:
    """By every class that transformers opens the base with, which of a Qwen3.5 may be the language
    model's own. The control is the base alone, from which the adapter moves the logits far."""
    peft = pytest.importorskip("peft", reason="peft is not installed (pip install 'isobit[dev]')")
    published(tmp_path / "base", name)
    mine, ids = _adapted(tmp_path / "base", tmp_path / "adapter"), tokens(20)
    wanted, opened = logits(mine, ids), 0
    for auto in _OPENED:
        values = transformers.AutoConfig.from_pretrained(tmp_path / "base")
        if type(values) not in auto._model_mapping:
            continue
        base = auto.from_pretrained(
            tmp_path / "base", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        before, opened = _theirs(base, ids), opened + 1
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        close = 5e-4 if name.startswith("qwen3_5") else 2e-4
        assert float((_theirs(adapted, ids) - wanted).abs().max()) < close
        assert float((before - wanted).abs().max()) > 0.05
    one_class = ("mistral3", "llava", "internvl", "qwen2", "qwen3_vl")
    assert opened == (1 if name.startswith(one_class) else 2)
    again = Model.load(tmp_path / "base", "float32", adapter=tmp_path / "adapter")
    assert torch.equal(logits(again, ids), wanted)


def test_what_peft_trains_on_a_model_that_sees_loads(tmp_path: Path) -> None:
    """The control is the base without its factors."""
    peft = pytest.importorskip("peft", reason="peft is not installed (pip install 'isobit[dev]')")
    base, ids = published(tmp_path / "base", "gemma3"), tokens(20)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=3, target_modules=r".*language_model.*\.(q|up)_proj", init_lora_weights=False
    )
    theirs = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    mine = Model.load(tmp_path / "base", "float32", adapter=tmp_path / "adapter")
    wanted = _theirs(theirs, ids)
    assert float((logits(mine, ids) - wanted).abs().max()) < 2e-4
    with theirs.disable_adapter():
        assert float((_theirs(theirs, ids) - wanted).abs().max()) > 0.05


def test_a_merged_adapter_is_the_whole_model(tmp_path: Path) -> None:
    """Its logits are those of base and adapter, and what reads images is as in the base."""
    published(tmp_path / "base", "gemma3")
    mine, ids = _adapted(tmp_path / "base", tmp_path / "adapter"), tokens(20)
    export(tmp_path / "adapter", tmp_path / "merged", "fp32", "float32", merge=True)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    )
    assert float((_theirs(theirs, ids) - logits(mine, ids)).abs().max()) < 2e-4
    base, merged = (load_file(tmp_path / at / "model.safetensors") for at in ("base", "merged"))
    assert base.keys() == merged.keys()
    changed = {key for key in base if not torch.equal(base[key], merged[key])}
    assert changed == {key for key in base if "language_model" in key and "_proj" in key}


def _rename(folder: Path, old: str, new: str, most: int | None = None) -> None:
    """Begin the names of an adapter's tensors with `new` for `old`: of `most` of them, or all."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    chosen = sorted(name for name in tensors if name.startswith(old))[:most]
    assert chosen
    for name in chosen:
        tensors[name.replace(old, new, 1)] = tensors.pop(name)
    save_file(tensors, path)


@pytest.mark.parametrize(
    "new", [_OLD, "base_model.model.language_model.model.layers."], ids=["alone", "transformers 4"]
)
def test_folders_of_before_load(new: str, tmp_path: Path) -> None:
    """As isobit wrote them, by the names of the language model alone, and as PEFT wrote them with
    an earlier transformers: the same bits."""
    published(tmp_path / "base", "gemma3")
    mine, ids = _adapted(tmp_path / "base", tmp_path / "adapter"), tokens(20)
    _rename(tmp_path / "adapter", _NEW, new)
    again = Model.load(tmp_path / "base", "float32", adapter=tmp_path / "adapter")
    assert torch.equal(logits(again, ids), logits(mine, ids))
    again.save(tmp_path / "again")
    assert all(key.startswith(_NEW) for key in load_file(tmp_path / "again" / _WEIGHTS))


_WEIGHTS = "adapter_model.safetensors"


def test_names_that_are_wrong_are_refused(tmp_path: Path) -> None:
    """In a line: of two classes at once, of a tower, of no class; and inside another model for a
    language model alone, whose own names load."""
    published(tmp_path / "base", "gemma3")
    _adapted(tmp_path / "base", tmp_path / "adapter")
    written = load_file(tmp_path / "adapter" / _WEIGHTS)

    def refused(base: str, match: str) -> None:
        with pytest.raises(IsobitError, match=match) as error:
            Model.load(tmp_path / base, "float32", adapter=tmp_path / "adapter")
        assert "\n" not in str(error.value)

    for new, match in (
        (_OLD, "named as of two classes of models"),
        ("base_model.model.model.vision_tower.layers.", "is no factor of a linear layer"),
        ("base_model.model.transformer.layers.", "is no factor of a linear layer"),
    ):
        _rename(tmp_path / "adapter", _NEW, new, 2)
        refused("base", match)
        save_file(written, tmp_path / "adapter" / _WEIGHTS)
    directory(tmp_path / "text", "gemma3")
    refused("text", r"is named as inside a model that reads images too.*expected base_model")
    _rename(tmp_path / "adapter", _NEW, _OLD)
    assert Model.load(tmp_path / "text", "float32", adapter=tmp_path / "adapter")
    _rename(tmp_path / "adapter", _OLD, "base_model.model.transformer.layers.")
    refused("text", "is no factor of a linear layer")


def test_towers_are_left_out_of_what_peft_adapts(tmp_path: Path) -> None:
    """Whose projections have the same names. An adapter of a language model alone has none."""
    published(tmp_path / "base", "gemma3")
    _adapted(tmp_path / "base", tmp_path / "adapter", ("q_proj",))
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert values["target_modules"] == ["q_proj"]
    assert "exclude_modules" in values
    _, text = directory(tmp_path / "text", "gemma3")
    _adapted(text, tmp_path / "alone", ("q_proj",))
    assert "exclude_modules" not in json.loads(
        (tmp_path / "alone" / "adapter_config.json").read_text()
    )


def test_a_folder_for_two_classes_has_the_same_factors_twice(tmp_path: Path) -> None:
    """Of a Qwen3.5, whose language model has a class of its own. Others than these are refused."""
    published(tmp_path / "base", "qwen3_5")
    mine, ids = _adapted(tmp_path / "base", tmp_path / "adapter", ("q_proj",)), tokens(20)
    path = tmp_path / "adapter" / _WEIGHTS
    written = load_file(path)
    inside = {name: tensor for name, tensor in written.items() if name.startswith(_NEW)}
    alone = {name.replace(_NEW, _OLD): tensor.clone() for name, tensor in inside.items()}
    assert inside
    assert written.keys() == inside.keys() | alone.keys()
    for some in (written, inside, alone):
        save_file(some, path)
        again = Model.load(tmp_path / "base", "float32", adapter=tmp_path / "adapter")
        assert torch.equal(logits(again, ids), logits(mine, ids))
    one = min(alone)
    for others in ({one: alone[one] + 1}, {one.replace("layers.3", "layers.0"): alone[one] * 1}):
        save_file(inside | alone | others, path)
        with pytest.raises(IsobitError, match="named as of two classes of models"):
            Model.load(tmp_path / "base", "float32", adapter=tmp_path / "adapter")


@pytest.mark.slow
def test_two_ranks_write_what_one_does(tmp_path: Path) -> None:
    """Experts' factors among them, which are together. The control is another seed."""
    published(tmp_path / "base", "qwen3_5_moe")

    def written(ranks: Ranks, seed: int = 0) -> bytes:
        folder = tmp_path / f"adapter-{ranks.size}-{seed}"
        new = NewAdapter(3, 6.0, seed=seed)
        Model.load(tmp_path / "base", "float32", adapter=new, ranks=ranks).save(folder)
        return (folder / _WEIGHTS).read_bytes()

    assert run(2, written)[0] == written(ALONE) != written(ALONE, 1)


@pytest.mark.parametrize("naming", [["Qwen3_5ForCausalLM"], None])
def test_the_class_that_config_json_names_decides(naming: list[str] | None, tmp_path: Path) -> None:
    """Where it names the language model's own, names are those of the language model alone."""
    published(tmp_path / "base", "qwen3_5")
    path = tmp_path / "base" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "architectures": naming}))
    _adapted(tmp_path / "base", tmp_path / "adapter", ("q_proj",))
    written = load_file(tmp_path / "adapter" / _WEIGHTS)
    assert any(key.startswith(_NEW) for key in written) == (naming is None)
    assert any(key.startswith(_OLD) for key in written)
