"""PEFT's folders: what is written here peft reads, and the other way round; what they may not ask
for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.adapters.peft import write_peft
from isobit.model.adapters.targets import NewAdapter
from tests.models import tiny_model

from .helpers import directory, oracle, tokens

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def _adapted(base: Path, folder: Path, **given: Any) -> Model:
    """A model with an adapter after an update, whose folder is written."""
    new = NewAdapter(4, 10, given.get("targets", TARGETS), rslora=given.get("rslora", False))
    model = Model.load(base, "float32", adapter=new)
    for number, parameter in enumerate(model.parameters()):
        parameter.data += 0.1 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(number)
        )
    model.sync()
    model.save(folder)
    return model


def _logprobs(theirs: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0]


def _farthest(model: Model, theirs: Any) -> float:
    ids = tokens(20)
    return float((model.logprobs([ids])[0] - _logprobs(theirs, ids)).abs().max())


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "qwen3-moe", "qwen3.5", "qwen3.5-moe", "granite", "phi3"]
    + ["qwen3-moe-mixed"]
    + [
        "deepseek-v3",
        "deepseek-v3-whole",
        "glm4-moe-lite",
        "glm4-moe",
        "minimax-m2",
        "qwen3-next",
        "qwen3-next-mixed",
        "mixtral",
        "gpt-oss",
        "gemma4",
        "gemma4-experts",
        "gemma4-small",
        "nemotron-h",
        "nemotron-h-latent",
    ],
)
def test_peft_loads_what_is_written(tmp_path: Path, family: str) -> None:
    """The same log-probabilities under float32, of rsLoRA too. The control is the model without its
    adapter."""
    peft = pytest.importorskip("peft", reason="peft is not installed (pip install 'isobit[dev]')")
    _, base = directory(tmp_path / "base", family)
    linear = ("in_proj_qkv", "in_proj_z", "out_proj")
    targets = {
        "qwen3-moe": ("all-linear",),  # of attention and of experts
        "qwen3-moe-mixed": ("all-linear",),  # and of a dense layer
        "mixtral": ("q_proj", "w1", "w3", "w2"),
        "qwen3.5": (*TARGETS, *linear),
        "qwen3.5-moe": ("all-linear",),  # of the MLP beside the experts too
        "gpt-oss": ("all-linear",),
        "gemma4-experts": ("all-linear",),
        "nemotron-h-latent": ("q_proj", "in_proj", "fc1_latent_proj", "fc2_latent_proj"),
        "nemotron-h": ("q_proj", "v_proj", "o_proj", "in_proj", "up_proj", "down_proj"),
        "deepseek-v3": ("all-linear",),  # of dense layers, experts, and the MLP beside them
        "deepseek-v3-whole": ("q_proj", "kv_b_proj", "gate_proj", "up_proj"),
        "glm4-moe-lite": ("all-linear",),
        "glm4-moe": ("all-linear",),
        "minimax-m2": ("all-linear",),
        "qwen3-next": ("all-linear",),
        "qwen3-next-mixed": ("all-linear",),
        "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    }.get(family, TARGETS)
    rslora = family in ("qwen3", "granite")
    model = _adapted(base, tmp_path / "adapter", targets=targets, rslora=rslora)
    close = (
        5e-5 if "3.5" in family or "next" in family or family.startswith("nemotron") else 2e-5
    )  # states of linear attention are summed in another order
    theirs = peft.PeftModel.from_pretrained(oracle(family), tmp_path / "adapter").eval()
    assert _farthest(model, theirs) < close
    with theirs.disable_adapter():
        assert _farthest(model, theirs) > 1e-2
        assert _farthest(model.without_adapter(), theirs) < close


@pytest.mark.parametrize(
    "which", [("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")]
)
@pytest.mark.parametrize(
    "family", ["qwen3-moe", "mixtral", "qwen3.5-moe", "gpt-oss", "gemma4-experts", "deepseek-v3"]
)
def test_what_peft_writes_of_experts_loads(
    tmp_path: Path, family: str, which: tuple[str, ...]
) -> None:
    """By target_parameters, where one A is that of gates and ups. The control exchanges two
    experts' factors."""
    peft = pytest.importorskip("peft", reason="peft is not installed (pip install 'isobit[dev]')")
    _, base = directory(tmp_path / "base", family)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=12,
        target_modules=["q_proj"],
        target_parameters=[
            f"{'' if family == 'gemma4-experts' else 'mlp.'}experts.{name}" for name in which
        ],
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(oracle(family), config).eval()
    with torch.no_grad():
        for number, parameter in enumerate(theirs.parameters()):
            if parameter.requires_grad:
                random = torch.Generator().manual_seed(number)
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    theirs.save_pretrained(tmp_path / "adapter")
    model = Model.load(base, "float32", adapter=tmp_path / "adapter")
    close = 5e-5 if family == "qwen3.5-moe" else 2e-5
    assert _farthest(model, theirs) < close
    model.save(tmp_path / "again")  # each expert by itself, or gates beside ups
    again = Model.load(base, "float32", adapter=tmp_path / "again")
    assert torch.equal(again.logprobs([tokens(20)])[0], model.logprobs([tokens(20)])[0])
    masters = model.named_parameters()
    role = "down_proj" if "down_proj" in which else "up_proj"
    role = {"down_proj": "w2", "up_proj": "w3"}[role] if family == "mixtral" else role
    first, second = (masters[f"layers.1.experts.{e}.{role}.lora_B"] for e in (0, 1))
    first.data, second.data = second.data.clone(), first.data.clone()
    model.sync()
    assert _farthest(model, theirs) > 1e-3


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe-lite", "qwen3-moe-mixed"])
def test_folders_whose_experts_are_apart_load(tmp_path: Path, family: str) -> None:
    """As isobit wrote them before: the same bits. The control leaves an expert out."""
    _, base = directory(tmp_path / "base", family)
    model = _adapted(base, tmp_path / "adapter", targets=("all-linear",))
    adapter = model.transformer.adapter
    assert adapter is not None
    assert adapter.together == "rows"
    before = replace(adapter, together=None, renamed=False)
    write_peft(tmp_path / "adapter", before, model.named_parameters(), model.ranks)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    assert any(".experts.1.up_proj." in name for name in tensors)
    again = Model.load(base, "float32", adapter=tmp_path / "adapter")
    assert torch.equal(again.logprobs([tokens(20)])[0], model.logprobs([tokens(20)])[0])
    save_file({n: t for n, t in tensors.items() if ".experts.1." not in n}, path)
    with pytest.raises(IsobitError, match="experts have factors of"):
        Model.load(base, "float32", adapter=tmp_path / "adapter")


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], "all-linear"])
def test_what_peft_writes_loads(tmp_path: Path, targets: Any) -> None:
    """With its alpha and rank, which the control changes."""
    peft = pytest.importorskip("peft", reason="peft is not installed (pip install 'isobit[dev]')")
    _, base = directory(tmp_path / "base", "qwen3")
    config = peft.LoraConfig(
        r=3, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False
    )
    torch.manual_seed(0)
    theirs = peft.get_peft_model(oracle("qwen3"), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    model = Model.load(base, "float32", adapter=tmp_path / "adapter")
    assert model.transformer.adapter is not None
    assert (model.transformer.adapter.rank, model.transformer.adapter.alpha) == (3, 12.0)
    assert _farthest(model, theirs) < 2e-5
    _change(tmp_path / "adapter", lora_alpha=6)
    assert _farthest(Model.load(base, "float32", adapter=tmp_path / "adapter"), theirs) > 1e-3


def _change(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """(a model, an adapter of it)."""
    tiny_model(scale=3.0).save(tmp_path / "base")
    _adapted(tmp_path / "base", tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


def test_a_folder_gives_back_every_bit_and_names_its_model(folders: tuple[Path, Path]) -> None:
    base, folder = folders
    written = load_file(folder / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in written
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    model = Model.load(folder, "bf16")  # by its own config
    assert (
        Path(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
        == base.resolve()
    )
    model.save(folder.parent / "again")
    for name in (
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "generation_config.json",
    ):
        assert (folder.parent / "again" / name).read_bytes() == (folder / name).read_bytes()
    assert not (folder / "config.json").exists()  # a model's


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora: DoRA cannot be read"),
    "rsLoRA as text": ({"use_rslora": "yes"}, "use_rslora has the wrong type"),
    "whole modules": (
        {"modules_to_save": ["lm_head"]},
        "modules_to_save: modules that are trained whole",
    ),
    "biases": ({"bias": "all"}, "bias: trained biases cannot be read"),
    "ranks": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern: ranks that differ"),
    "another kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4 changes the base model"),
    "no rank": ({"r": None}, "r: expected a whole number"),
    "no alpha": ({"lora_alpha": 0}, "lora_alpha: expected a number above 0"),
    "another rank": ({"r": 5}, r"has shape \(4, 32\), but the model and r ask for \(5, 32\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_config_may_not_ask_for(folders: tuple[Path, Path], case: str) -> None:
    base, folder = folders
    changes, line = REFUSED[case]
    Model.load(base, "bf16", adapter=folder)  # the control
    _change(folder, **changes)
    with pytest.raises(IsobitError, match=line) as found:
        Model.load(base, "bf16", adapter=folder)
    assert "\n" not in str(found.value)


def _without(key: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if key in name] and None


def _with(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "no B": (
        _without("layers.1.self_attn.q_proj.lora_B"),
        "lora_B.weight is missing; A and B belong together",
    ),
    "nothing": (_without("lora"), "holds no tensors"),
    "a head": (
        _with("base_model.model.lm_head.lora_A.weight", torch.ones(4, 32)),
        "lm_head.* is no factor",
    ),
    "an expert": (
        _with(
            "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight", torch.ones(4, 32)
        ),
        "adapters of embeddings, heads and routers are not read",
    ),
    "NaN": (
        _with(
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
            torch.full((4, 32), torch.nan),
        ),
        "holds NaN or infinity",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(folders: tuple[Path, Path], case: str) -> None:
    base, folder = folders
    change, line = TENSORS[case]
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(IsobitError, match=line):
        Model.load(base, "bf16", adapter=folder)


def test_what_is_no_adapter_is_told_what_would_be(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base, _ = folders
    with pytest.raises(
        IsobitError,
        match=r"adapter .*nothing: no such directory; expected a PEFT folder, such as a ",
    ):
        Model.load(base, adapter=tmp_path / "nothing")
    with pytest.raises(
        IsobitError,
        match=r"no adapter_config\.json in it; expected a PEFT folder, .*checkpoints/step",
    ):
        Model.load(base, adapter=tmp_path)


def test_an_adapter_whose_model_is_elsewhere(folders: tuple[Path, Path]) -> None:
    base, folder = folders
    moved = base.rename(base.with_name("moved"))
    with pytest.raises(
        IsobitError, match=r"its model .*base is not here; give the model's directory"
    ):
        Model.load(folder, "bf16")
    assert Model.load(moved, "bf16", adapter=folder).transformer.adapter is not None
    with pytest.raises(IsobitError, match="is an adapter itself"):
        Model.load(folder, "bf16", adapter=folder)
    with pytest.raises(IsobitError, match=r"adapter .*nowhere: no such directory"):
        Model.load(moved, "bf16", adapter=base.with_name("nowhere"))
