"""A run's memory: planned before it reads weights, `optimizer.micro_batch_tokens: auto`, and how it
is measured."""

import json
import math
import re
import string
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml

from isobit.config import load_config
from isobit.config.sections import AdapterConfig
from isobit.engine import engine
from isobit.errors import IsobitError
from isobit.model import Experts, Model, ModelConfig
from isobit.model.hub.names import parts as parts_of
from isobit.precision import precision_from
from isobit.training.commands.dry_run import dry_run
from isobit.training.parts.assembly import open_parts
from isobit.training.plan import Job, host, meta, plan
from isobit.training.plan.host import this_machine
from isobit.training.plan.job import architecture, job_with
from isobit.training.plan.learning import Backward, beyond, measure
from isobit.training.plan.live_bytes import LiveBytes
from isobit.training.plan.memory import fitting_tokens, num_parameters
from isobit.training.plan.meta import Described, learning_bytes
from isobit.training.train import resume, train
from tests import warm
from tests.models import tiny_model
from tests.runs import dry_run_text, write_config

GIB = 2**30
_AUTO = "optimizer.micro_batch_tokens=auto"


def _job(folder: Path, model: Path, *overrides: str) -> Job:
    """Of a run here, as it is planned before it begins; its longest prompt has 4 tokens."""
    config = load_config(write_config(folder, model), overrides)
    return job_with(
        config, architecture(str(model)), 4, this_machine(tiny_model().ops, config.ranks)
    )


def _memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(host, "memory_limit", lambda device: (size, "memory of this machine"))


def test_live_bytes_are_those_of_storages() -> None:
    kept = torch.ones(1000)
    with LiveBytes() as meter:
        made = kept * 2
        view = made[:10]
        del made
        assert (meter.live, meter.peak) == (4000, 4000)
        other = (kept.double() + 1).float()
        assert meter.live == 8000
        assert meter.take() == 4000 + 8000 + 8000
        del view, other
    assert meter.live == 0
    assert meter.peak == 8000


@pytest.mark.slow
def test_beyond_what_is_measured_bytes_grow_in_straight_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To 3 % of what is measured; the control is a quarter of the tokens."""
    for family, more in (("qwen3", {}), ("qwen3_moe", {"experts": Experts(64, 2, 16)})):
        model = tiny_model("fp8", family, max_positions=2048, num_layers=4, **more)
        given = Described(model.config, model.precision, host=True, packs=True)
        for level in (False, "mlp", True):
            measured = max(learning_bytes(given, 2048, Backward(level)))
            learning_bytes.cache_clear()
            monkeypatch.setattr(meta, "_MOST_TOKENS", 512)
            assert max(learning_bytes(given, 2048, Backward(level))) == pytest.approx(
                measured, rel=0.03
            )
            assert max(learning_bytes(given, 512, Backward(level))) < 0.6 * measured
            monkeypatch.undo()
            learning_bytes.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["fp8", "nvfp4[activation=bf16]"])
@pytest.mark.parametrize("gradients", ["added", "kept"])
def test_two_models_of_few_layers_say_what_many_take(
    flow: str, gradients: Literal["added", "kept"]
) -> None:
    """To 1 %, whether saved activations or gradients are most of a backward."""
    config = tiny_model(hidden_size=256, intermediate_size=512).config
    adapter = AdapterConfig(8, alpha=1.0) if flow != "fp8" else None
    how = Backward(True, gradients)
    for tokens in (32, 1024):
        few, more, many = (
            measure(meta.transformer(described), tokens, how)
            for layers in (3, 5, 12)
            for described in (
                Described(replace(config, num_layers=layers), precision_from(flow), adapter),
            )
        )
        for phases in zip(few, more, many):
            assert beyond(*phases[:2], 3.5) == pytest.approx(max(phases[2]), rel=0.01)


def test_more_chunks_of_logits_hold_one_gradient_of_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each adds to it; the control makes its own first."""
    model = tiny_model("bf16", hidden_size=256)
    head = 4 * model.config.vocab_size * model.config.hidden_size
    ops = model.transformer.ops["learner"]
    added = ops.head_backward

    def peak(chunks: int) -> int:
        tokens = torch.arange(4 * chunks) % model.config.vocab_size
        hidden = torch.zeros(4 * chunks, 256, dtype=torch.bfloat16, requires_grad=True)
        with torch.enable_grad(), LiveBytes() as live:
            model.transformer.head_logprobs(hidden, tokens, chunk=4)[0].sum().backward()
            return live.peak

    def apart(*given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        into, trained = given[6:]
        dhidden, dweight = added(*given[:6], into=None, trained=trained)
        return dhidden, dweight if into is None or dweight is None else into.add_(dweight)

    one, six = peak(1), peak(6)
    assert one > head
    monkeypatch.setattr(ops, "head_backward", apart)
    assert peak(6) - six > 0.9 * head
    assert peak(1) == one


def test_the_total_is_what_is_held_and_the_largest_part(tmp_path: Path, base_model: Path) -> None:
    job = _job(tmp_path, base_model)
    found = plan(job)
    held, during = dict(found.held), dict(found.parts)
    masters = 4 * num_parameters(job.model)
    assert held["FP32 masters"] == masters
    assert held["AdamW moments"] == 2 * masters
    assert found.total == sum(held.values()) + max(during.values())
    other = plan(_job(tmp_path, base_model, "optimizer.masters=bf16"))
    del held["FP32 masters"]
    assert dict(other.held) == {"BF16 masters": masters // 2, **held}
    assert other.parts[0] == found.parts[0], "gradients and activations are what they were"
    assert (
        dict(other.parts)["updating: gradients, their norm, the moments' values"]
        == masters * 5 // 2
    )


def test_ranks_share_what_they_can(tmp_path: Path) -> None:
    """And on a CPU its memory."""
    tiny_model(hidden_size=256, intermediate_size=768, num_layers=6).save(tmp_path / "model")
    one, four = (_job(tmp_path, tmp_path / "model", f"ranks={n}") for n in (1, 4))
    alone, each = dict(plan(one).held), dict(plan(four).held)
    assert each["AdamW moments"] == pytest.approx(alone["AdamW moments"] / 4, rel=0.1)
    assert each["working weights, rollout"] == alone["working weights, rollout"]
    assert four.machine.memory == one.machine.memory // 4


def test_caches_are_sized_beside_moments_and_gradients_that_do_not_exist_yet(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        engine, "most_cache_bytes", lambda device, reserved: asked.append(reserved) or 1 << 20
    )
    parts = open_parts(
        load_config(write_config(tmp_path, base_model), ["evaluation.every=1"]), quiet=True
    )
    parts.processes.close()
    masters = sum(p.numel() for p in parts.model.parameters())
    assert (
        asked == [12 * masters] * 2
    )  # two moments and a gradient, in FP32; for the rollout and for the evaluation


@pytest.mark.slow
def test_a_dry_run_says_whether_it_fits_and_what_lowers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with the total that a plan with this key has. Where the weights are too large they are
    not read."""
    many = ("prompts_per_step=64", "optimizer.micro_batch_tokens=4096")
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 6}
    tiny_model(alphabet=string.printable, **sizes).save(tmp_path / "model")
    config = load_config(write_config(tmp_path, tmp_path / "model"), many)
    text = dry_run_text(config)
    assert re.search(
        r"^fits: [\d.]+ GiB of [\d.]+ GiB \(memory of .*\), [\d.]+ GiB free$", text, re.M
    )
    (total,) = re.findall(r"^total, \w+ +([\d.]+) MiB$", text, re.M)
    _memory(monkeypatch, int(0.95 * float(total) * 2**20))
    text = dry_run_text(config).partition("does not fit: ")[2]
    lines = dict(re.findall(r"^  (\S+?)=\S+ +([\d.]+ GiB)(?:, fits)?$", text, re.M))
    keys = ["optimizer.micro_batch_tokens", "optimizer.activation_checkpointing"]
    assert list(lines)[:2] == keys
    assert {"optimizer.state", "optimizer.masters", "adapter.rank"} <= set(lines)
    said: list[str] = []
    _memory(monkeypatch, 1 << 20)
    with pytest.raises(IsobitError, match="the rest of the check, which needs them, is left out"):
        dry_run(config, said.append)
    assert "does not fit" in said[-2]
    assert "first prompt" in said[-1]
    assert "weights are read" not in "\n".join(said)


def test_a_run_that_cannot_fit_says_so_before_it_reads_weights(
    tmp_path: Path,
    base_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = load_config(write_config(tmp_path, base_model))

    def said() -> str:
        def read(*_: object) -> Model:
            raise IsobitError("no weights are read here")

        monkeypatch.setattr("isobit.training.parts.assembly.load_trained", read)
        with pytest.raises(IsobitError, match="no weights are read here"):
            open_parts(config, quiet=False)
        return capsys.readouterr().err

    assert said() == ""
    _memory(monkeypatch, 1 << 10)
    line = said()
    assert "this run will not fit" in line
    assert line.count("\n") == 1


def test_auto_takes_what_fits_and_a_resumed_run_repeats_it(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More memory, more tokens, up to the batch; the number is in config.yaml, and stays when the
    memory changes."""

    def auto(size: int) -> int:
        _memory(monkeypatch, size)
        return fitting_tokens(_job(tmp_path, base_model, "prompts_per_step=200", _AUTO))

    for tokens in (2048, 4096):  # of fewer, something else than learning takes most
        given = (f"optimizer.micro_batch_tokens={tokens}", "prompts_per_step=200")
        needed = plan(_job(tmp_path, base_model, *given)).total
        assert auto(int(needed / 0.9) + 4096) == tokens
    whole = 200 * 4 * _job(tmp_path, base_model).longest
    assert auto(1 << 40) == -(-whole // 128) * 128
    with pytest.raises(
        IsobitError, match=r"one sequence of .* tokens needs .* GiB, more than 90 %"
    ):
        auto(1 << 20)
    _memory(monkeypatch, 1 << 40)
    config = load_config(write_config(tmp_path, base_model), [_AUTO, "steps=1"])
    run = Path(train(config, quiet=True).run_dir)
    number: Any = yaml.safe_load((run / "config.yaml").read_text())["optimizer"][
        "micro_batch_tokens"
    ]
    assert number == 128
    _memory(monkeypatch, 1 << 20)
    resume(run, ["steps=2"], quiet=True)
    assert (
        yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["micro_batch_tokens"]
        == number
    )


def test_the_smallest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's, where it has one; `max` is none."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("isobit.engine.memory._CGROUPS", (str(limit),))
    machine = host.memory_limit(torch.device("cpu"))
    assert machine[1] == "memory of this machine"
    limit.write_text("max\n")
    assert host.memory_limit(torch.device("cpu")) == machine
    limit.write_text("1000000\n")
    assert host.memory_limit(torch.device("cpu")) == (1_000_000, "memory of this container")


QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
DRIVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, ({most}, {most}))
from isobit.training.plan import host
host.memory_limit = lambda device: ({limit}, "memory of this machine")
from isobit import cli
sys.argv = ["isobit", *{arguments!r}]
try:
    cli.main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
"""


def eight_billion(folder: Path) -> Path:
    """Qwen3-8B as a directory whose file of weights has a header, and no bytes on the disk behind
    it."""
    folder.mkdir()
    tiny_model(alphabet=string.printable).tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    header, end = {}, 0
    config = ModelConfig.from_hf(QWEN3_8B, "config.json")
    for name, shape in (tensor for _, tensors in parts_of(config) for tensor in tensors):
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks in KiB, and sparse files, are Linux's")
def test_a_dry_run_plans_eight_billion_parameters_where_they_do_not_fit(tmp_path: Path) -> None:
    """The table comes, with what does not fit and what would lower it; no weight is read, so the
    process stays small, where the weights alone are 16 GB. The control is a machine on which they
    would fit, whose dry run reads them."""
    model = eight_billion(tmp_path / "model")
    config = write_config(tmp_path, model)

    def run(limit: int) -> subprocess.CompletedProcess[str]:
        given = ["train", str(config), "--dry-run"]
        driver = DRIVER.format(limit=limit, most=3 * GIB, arguments=given)
        (tmp_path / "driver.py").write_text(driver)
        return warm.start(["python", str(tmp_path / "driver.py")], tmp_path).wait()

    small = run(40 * GIB)
    *said, peak = small.stderr.strip().splitlines()
    assert small.returncode != 0
    assert int(peak) < 1.5 * GIB
    table, line = small.stdout.split("memory, planned from config.json")[1].split("does not fit: ")
    parameters = num_parameters(ModelConfig.from_hf(QWEN3_8B, "config.json"))
    assert re.search(rf"^FP32 masters +{4 * parameters / 2**20:.1f} MiB$", table, re.M)
    assert "optimizer.state=8bit" in line
    assert "first prompt" in line
    assert len(said) == 1
    assert "the rest of the check, which needs them, is left out" in said[0]
    large = run(400 * GIB)
    assert "fits: " in large.stdout
    assert large.returncode != 0, "the control: reading the weights takes more than the process may"
