"""Models around a language model, to read images, written whole: transformers opens what is
written, and nothing but what was trained differs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from isobit.config import load_config
from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError
from isobit.model import Model, ModelConfig
from isobit.model.hub.checkpoint import read_json, write_json
from isobit.training.commands.export import export
from isobit.training.train import resume, train
from tests.distributed.threads import run
from tests.runs import write_config

from .helpers import logits, oracle_logits, tokens
from .test_wrapped import PUBLISHED, published, rename


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def _opened(folder: Path) -> Any:
    """The model by the class that reads images, which must find every tensor and no other."""
    model: Any
    report: Any
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"]
    return model.eval()


def _taught(folder: Path, **where: Any) -> Model:
    """The model of a folder with another final norm."""
    model = Model.load(folder, "float32", **where)
    for norm in (rows for name, rows in model.named_parameters().items() if name == "final_norm"):
        norm.data += 0.25  # on the rank that has it
    model.sync()
    return model


@pytest.mark.parametrize(
    ("name", "naming"),
    [(name, "transformers 5") for name in PUBLISHED]
    + [(name, "transformers 4") for name in ("gemma3", "llava_next", "internvl")],
)
def test_transformers_opens_the_whole(name: str, naming: str, tmp_path: Path) -> None:
    """By its own class, with every tensor; and names, types and bytes of all that is not trained
    are those of the files read."""
    published(tmp_path / "base", name)
    rename(tmp_path / "base", naming)
    base = _tensors(tmp_path / "base")
    tower = {key: tensor.bfloat16() for key, tensor in base.items() if "vis" in key}
    base |= tower
    save_file(base, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "base" / "preprocessor_config.json").write_text('{"patch_size": 14}')
    _taught(tmp_path / "base").save(tmp_path / "saved")
    saved = _tensors(tmp_path / "saved")
    assert saved.keys() == base.keys()
    assert {key: t.dtype for key, t in saved.items()} == {key: t.dtype for key, t in base.items()}
    changed = [key for key, tensor in saved.items() if not torch.equal(tensor, base[key])]
    assert len(changed) == 1
    assert changed[0].endswith("norm.weight")
    assert tower
    assert (tmp_path / "saved" / "preprocessor_config.json").read_text() == '{"patch_size": 14}'
    values, written = (read_json(tmp_path / at / "config.json") for at in ("base", "saved"))
    assert written == {**values, "dtype": "float32"} | {
        key: {k: v for k, v in value.items() if k != "dtype"}
        for key, value in written.items()
        if key == "text_config"
    }
    theirs, ids = _opened(tmp_path / "saved"), tokens(30, 3)
    again = Model.load(tmp_path / "saved", "float32")
    close = 2e-4 if name.startswith("qwen3_5") else 1e-4
    assert float((logits(again, ids) - oracle_logits(theirs, ids)).abs().max()) <= close
    assert again.config.wrapped


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen2_5_vl"])
def test_several_files_hold_what_one_does(name: str, tmp_path: Path) -> None:
    """Files that were read may be gone when they are written back, as a run's earlier checkpoint
    is; and several files are read as one."""
    published(tmp_path / "base", name)
    model = _taught(tmp_path / "base")
    for path in (tmp_path / "base").iterdir():
        path.unlink()
    model.save(tmp_path / "shards", shard_bytes=20_000)
    model.save(tmp_path / "one")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 3
    one, shards = _tensors(tmp_path / "one"), _tensors(tmp_path / "shards")
    assert one.keys() == shards.keys()
    assert all(torch.equal(one[key], shards[key]) for key in one)
    _opened(tmp_path / "shards")
    Model.load(tmp_path / "shards", "float32").save(tmp_path / "again")
    assert _bytes(tmp_path / "again") == _bytes(tmp_path / "one")


def test_two_ranks_write_what_one_does(tmp_path: Path) -> None:
    """The control is another norm."""
    published(tmp_path / "base", "qwen3_5_moe")

    def written(ranks: Ranks, taught: bool = True) -> bytes:
        folder = tmp_path / f"{ranks.size}-{taught}"
        model = (_taught if taught else Model.load)(tmp_path / "base", ranks=ranks)
        model.save(folder)
        return _bytes(folder)

    assert run(2, written)[0] == written(ALONE) != written(ALONE, False)


def _bytes(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("inner", [40, 24])
def test_experts_are_written_in_the_form_that_was_read(tmp_path: Path, inner: int) -> None:
    """As Qwen3-VL-MoE was published: transposed, gates before ups; also where these are square. The
    control is the other form, with the same log-probabilities."""
    published(tmp_path / "base", "qwen3_vl_moe", moe_intermediate_size=inner)
    rows = _tensors(tmp_path / "base")
    experts = [key for key in rows if ".experts." in key]
    assert experts
    halves = rows | {key: rows[key].transpose(1, 2).contiguous() for key in experts}
    before, ids = Model.load(tmp_path / "base", "float32"), tokens(30, 3)
    save_file(halves, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    model = Model.load(tmp_path / "base", "float32")
    assert torch.equal(logits(model, ids), logits(before, ids))
    for read, wanted in ((before, rows), (model, halves)):
        read.save(tmp_path / "saved")
        saved = _tensors(tmp_path / "saved")
        assert all(torch.equal(saved[key], wanted[key]) for key in wanted)
        if inner == 40 or read is before:  # transformers takes a square as its own form
            theirs = _opened(tmp_path / "saved")
            assert float((logits(model, ids) - oracle_logits(theirs, ids)).abs().max()) <= 1e-4


def test_a_flat_config_is_written_back_flat(tmp_path: Path) -> None:
    """As that of a published Qwen2.5-VL is: the language model's keys are its own, and its rotary
    embedding is called mrope."""
    theirs, ids = published(tmp_path / "base", "qwen2_5_vl"), tokens(30, 3)
    path = tmp_path / "base" / "config.json"
    values = read_json(path)
    text = values.pop("text_config")
    axes = text.pop("rope_parameters")
    text |= {"rope_theta": axes["rope_theta"]}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": axes["mrope_section"]}}
    flat = {**text, **values, "torch_dtype": "bfloat16"}
    write_json(path, flat)
    model = _taught(tmp_path / "base")
    model.save(tmp_path / "saved", torch.bfloat16)
    written = read_json(tmp_path / "saved" / "config.json")
    assert {**written, "torch_dtype": "bfloat16"} == {**flat, "dtype": "bfloat16"}
    _opened(tmp_path / "saved")
    del flat["rope_scaling"]  # the control: without it the same angles, and no axes
    write_json(path, flat)
    plain = Model.load(tmp_path / "base", "float32")
    assert float((logits(plain, ids) - oracle_logits(theirs, ids)).abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("name", "outer", "inner", "tied"),
    [
        ("qwen3_vl", False, True, False),
        ("qwen3_vl", True, False, True),
        ("qwen3_vl", None, True, True),
        ("gemma3", False, True, False),
        ("qwen2_5_vl", False, True, True),
        ("llava", True, False, True),
    ],
)
def test_the_outer_tie_counts(
    name: str, outer: bool | None, inner: bool, tied: bool, tmp_path: Path
) -> None:
    """As for transformers, which takes the inner one too in those models whose class says so."""
    published(tmp_path, name)
    values = read_json(tmp_path / "config.json")
    values["tie_word_embeddings"], values["text_config"]["tie_word_embeddings"] = outer, inner
    assert ModelConfig.from_hf(values).tie_embeddings == tied
    if outer is not None:
        theirs = transformers.AutoConfig.for_model(**values)
        assert theirs.tie_word_embeddings == tied


def test_fp8_blocks_leave_the_tower_as_it_is(tmp_path: Path) -> None:
    """And transformers reads both. Of a Qwen3-VL-MoE, whose experts it takes together alone, there
    are none."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    published(tmp_path / "base", "qwen3_vl", **sizes)
    export(tmp_path / "base", tmp_path / "fp8", "fp8", "fp8")
    base, written = _tensors(tmp_path / "base"), _tensors(tmp_path / "fp8")
    tower = [key for key in base if "visual" in key]
    assert all(torch.equal(base[key], written[key]) for key in tower)
    assert "model.language_model.layers.0.mlp.up_proj.weight_scale_inv" in written
    theirs, ids = _opened(tmp_path / "fp8").float(), tokens(30, 3)
    again = Model.load(tmp_path / "fp8", "float32")
    assert torch.allclose(logits(again, ids), oracle_logits(theirs, ids), atol=2e-3, rtol=1e-4)
    again.save(tmp_path / "plain")  # what was read as blocks is written without
    assert "quantization_config" not in read_json(tmp_path / "plain" / "config.json")
    _opened(tmp_path / "plain")
    published(tmp_path / "experts", "qwen3_vl_moe")
    with pytest.raises(IsobitError, match="stores experts together; give --format bf16"):
        export(tmp_path / "experts", tmp_path / "none", "fp8", "fp8")


@pytest.mark.slow
def test_a_run_goes_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    """The base and the checkpoint from which it goes on may be gone by its next one. The control
    is the run that went through."""
    published(tmp_path / "base", "qwen3_5")
    tower = {key: t for key, t in _tensors(tmp_path / "base").items() if "visual" in key}
    ends = []
    for name, steps in (("through", [4]), ("again", [2, 4])):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, tmp_path / "base", steps=steps[0])
        last = train(load_config(config, ["run.keep_last=1"]))
        for more in steps[1:]:
            last = resume(last.run_dir, [f"steps={more}"])
        (checkpoint,) = (last.run_dir / "checkpoints").glob("step-*")
        _opened(checkpoint)
        ends.append(_tensors(checkpoint))
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    assert tower
    assert all(torch.equal(ends[1][key], tower[key]) for key in tower)
