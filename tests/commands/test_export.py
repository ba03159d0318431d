"""`isobit export`: whole directories, of models and of runs, and one line for what cannot be."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from isobit import Model, load_config, train
from isobit.cli import app
from isobit.errors import IsobitError
from isobit.kernels import tensors_of
from isobit.training.commands.export import export

from ..models import tiny_model
from ..runs import write_config

BLOCKS = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are whole blocks."""
    path = tmp_path_factory.mktemp("models") / "blocks"
    tiny_model(family="llama", **BLOCKS).save(path)
    return path


def test_a_run_is_exported_from_its_newest_checkpoint(tmp_path: Path, blocks: Path) -> None:
    config = load_config(write_config(tmp_path, blocks, precision="fp8-unified"))
    train(config)
    run = tmp_path / "run"
    newest = load_file(run / "checkpoints" / "step-000004" / "model.safetensors")
    done = CliRunner().invoke(
        app, ["export", str(run), "--to", str(tmp_path / "out"), "--format", "fp32"]
    )
    assert done.exit_code == 0, done.output
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in newest.items())
    with pytest.raises(IsobitError, match="has no best model: its evaluation is off"):
        export(run, tmp_path / "best", "bf16", None, best=True)
    text = export(run, tmp_path / "fp8", "fp8", None)
    assert "14 matrices in FP8 blocks, as the rollout under fp8-unified multiplies them" in text
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    found = Model.load(
        run / "checkpoints" / "step-000004", "fp8-unified"
    ).transformer.rollout_weights()
    by_name = {weight.name: weight.working for weight in found}
    codes = stored["model.layers.1.self_attn.o_proj.weight"].view(torch.uint8)
    assert torch.equal(codes, tensors_of(by_name["layers.1.o"])[0].view(torch.uint8))
    assert not torch.equal(
        exported["model.embed_tokens.weight"],
        load_file(blocks / "model.safetensors")["model.embed_tokens.weight"],
    )


def test_bf16_is_half_of_fp32_and_loads(tmp_path: Path, blocks: Path) -> None:
    export(blocks, tmp_path / "bf16", "bf16", None)
    export(blocks, tmp_path / "fp32", "fp32", None)
    sizes = {
        name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("bf16", "fp32")
    }
    assert sizes["bf16"] < 0.55 * sizes["fp32"]
    assert Model.load(tmp_path / "bf16").config == Model.load(tmp_path / "fp32").config


def test_large_models_are_written_in_shards(tmp_path: Path, blocks: Path) -> None:
    export(blocks, tmp_path / "out", "fp8", None, shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    again, whole = Model.load(tmp_path / "out"), Model.load(blocks)
    assert torch.equal(again.logprobs([[1, 2, 3]])[0], whole.logprobs([[1, 2, 3]])[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "gguf"], "--format 'gguf': choose from bf16, fp32, fp8"),
        (["--precision", "fp8"], "with --format bf16 leave it out"),
        (["--format", "fp8", "--precision", "nvfp4"], "FP8 blocks need weights in e4m3 128x128"),
        (["--format", "fp8", "--precision", "fp9"], "unknown precision preset 'fp9'"),
    ],
)
def test_refused(tmp_path: Path, blocks: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["export", str(blocks), "--to", str(tmp_path / "out"), *words])
    assert isinstance(done.exception, IsobitError)
    assert message in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_nothing_half_written_is_left(tmp_path: Path, blocks: Path, base_model: Path) -> None:
    with pytest.raises(IsobitError, match=r"no layer can be stored in FP8 blocks"):
        export(base_model, tmp_path / "out", "fp8", None)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    with pytest.raises(
        IsobitError, match=r"taken exists and is not empty; choose another directory \(--to\)"
    ):
        export(blocks, tmp_path / "taken", "bf16", None)
    (tmp_path / "file").write_text("")
    for place, what in ((tmp_path / "file", "a file"), (Path("/dev/full"), "a device")):
        with pytest.raises(IsobitError, match=f"{place} is {what}; choose another directory"):
            export(blocks, place, "bf16", None)
    with pytest.raises(IsobitError, match=r"cannot write .*file/out: Not a directory"):
        export(blocks, tmp_path / "file" / "out", "bf16", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]
