"""Runs that train an adapter: rollout and learner agree in every bit, only the adapter changes, and
runs repeat."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from isobit.cli import app
from isobit.config import load_config, load_sft_config
from isobit.errors import IsobitError, RunFailed
from isobit.kernels import tensors_of
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter, targeted
from isobit.monitor.report.summary import about
from isobit.precision import PackedFP4, packed_fp4
from isobit.rl.learner.learner import Learner
from isobit.run.checkpoints import all_checkpoints
from isobit.run.directory import read_jsonl
from isobit.training.commands.dry_run import supervised_dry_run
from isobit.training.loop import training_loop
from isobit.training.train import TrainResult, open_run, resume, train, train_supervised
from tests.models import tiny_model
from tests.runs import dry_run_text, fingerprint, write_config

ADAPTER = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    gemma4 = ("gemma4_text", "gemma4_text-experts", "gemma4_text-small")
    for family in ("qwen3", "qwen3_moe", "gemma3_text", *gemma4, "gpt_oss", "nemotron_h-latent"):
        tiny_model(family=family, scale=4.0).save(folder / family)
    return folder


def _config(folder: Path, models: Path, family: str = "qwen3", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {
        "adapter": ADAPTER,
        "optimizer": {"learning_rate": 0.02},
    }
    return write_config(folder, models / family, **{**settings, **changes})


def _run(folder: Path, models: Path, **changes: Any) -> TrainResult:
    return train(load_config(_config(folder, models, **changes)), quiet=True)


@pytest.mark.parametrize(
    ("precision", "family"),
    [
        *product(
            ("fp8", "fp8-unified", "bf16", "nvfp4", "nvfp4[activation=bf16]"),
            ("qwen3", "qwen3_moe"),
        ),
        ("mxfp8", "qwen3"),
        ("mxfp8", "qwen3_moe"),
        ("nvfp4[activation=bf16, kv_cache=int8]", "gpt_oss"),
        ("fp8", "gemma3_text"),
        ("fp8", "gemma4_text"),
        ("fp8", "gemma4_text-experts"),
        ("fp8", "gemma4_text-small"),
        ("fp8", "gpt_oss"),
        ("fp8", "nemotron_h-latent"),
    ],
)
def test_no_token_differs_after_updates(
    tmp_path: Path, models: Path, precision: str, family: str
) -> None:
    """Several updates a batch, whose adapters the next rollout must have. Rows agree where they are
    learned from as where they are compared: `on_mismatch` is `stop`."""
    changes = {"precision": precision, "family": family, "algorithm": {"updates_per_batch": 2}}
    rows = _run(tmp_path, models, **changes).metrics[-4:]
    assert [row["mismatch/differing_tokens"] for row in rows] == [0.0] * 4
    assert all(row["mismatch/compared_tokens"] > 0 and row["grad_norm"] > 0 for row in rows)


def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second batch on the learner has another B than the rollout had, under the same
    version."""
    learn, seen = Learner.learn, []

    def moved(self: Learner, *given: Any) -> Any:
        seen.append(1)
        if len(seen) > 1:
            for name, parameter in self.model.named_parameters().items():
                if name.endswith("lora_B"):
                    parameter.data += 0.05
            version = self.model.weights_version
            self.model.sync()
            self.model.transformer.count_from(version)
        return learn(self, *given)

    monkeypatch.setattr(Learner, "learn", moved)


def test_an_adapter_that_the_rollout_does_not_see_is_noticed(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test before this one."""
    _stale(monkeypatch)
    rows = _run(tmp_path / "warn", models, on_mismatch="warn", run={"check_memory": False}).metrics
    differing = [
        row["mismatch/differing_tokens"] for row in rows if "mismatch/differing_tokens" in row
    ]
    assert differing[0] == 0
    assert all(count > 0 for count in differing[1:])
    with monkeypatch.context() as patch:
        _stale(patch)
        with pytest.raises(RunFailed, match="differ"):
            _run(tmp_path / "stop", models, run={"check_memory": False})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_base_two_codes_to_a_byte_trains_what_a_byte_a_code_trains(
    tmp_path: Path, models: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of the run's result, but the memory that it reports. The control exchanges the
    halves of each byte, and learns something else."""

    def learned(name: str) -> dict[str, str]:
        found = fingerprint(_run(tmp_path / name, models, family=family, precision="nvfp4").run_dir)
        rows = json.loads(found["metrics"])
        held.append(max(row.pop("memory/weights_mib") for row in rows))
        return found | {"metrics": json.dumps(rows)}

    held: list[float] = []
    found = learned("nibbles")
    with monkeypatch.context() as patch:
        patch.setattr(packed_fp4, "holds", lambda spec, shape: False)
        assert learned("a byte a code") == found
        assert held[0] < held[1]
    with monkeypatch.context() as patch:
        patch.setattr(
            packed_fp4, "packed", lambda q, x, packed=packed_fp4.packed: _exchanged(packed(q, x))
        )
        assert learned("exchanged")["model.safetensors"] != found["model.safetensors"]


def _exchanged(found: PackedFP4) -> PackedFP4:
    return replace(found, codes=found.codes << 4 | found.codes >> 4)


@pytest.mark.parametrize(
    ("precision", "kl"), [("fp8-rollout", 0.05), ("mxfp8-rollout", 0.05), ("nvfp4-rollout", 0.5)]
)
def test_two_engines_receive_the_adapter(
    tmp_path: Path, models: Path, precision: str, kl: float
) -> None:
    """At every sync, A and B and no more; the rollout rounds in its own way, so its bits differ,
    and its values hardly do."""
    rows = _run(tmp_path, models, precision=precision).metrics[-4:]
    factors = 2 * sum(
        4 * sum(shape)
        for shape in ((32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32))
    )
    assert all(row["sync/bytes"] == 2 * factors for row in rows)
    assert all(0 < row["mismatch/kl_k3"] < kl for row in rows)


def _working(model: Model) -> dict[str, Tensor]:
    tensors = model.transformer.rollout_tensors()
    return {
        name: (t if isinstance(t, Tensor) else tensors_of(t)[0].view(torch.uint8)).clone()
        for name, t in tensors
    }


def test_a_run_learns_and_changes_the_adapter_alone(tmp_path: Path, models: Path) -> None:
    """The reward rises, and every factor moves; no working weight of the model changes a bit, and
    memory is the adapter's."""
    changes = {"steps": 12, "sampling": {"group_size": 8, "max_new_tokens": 3}}
    config = load_config(_config(tmp_path, models, **changes))
    with open_run(config, quiet=True) as session:
        model = session.parts.model
        before = _working(model)
        training_loop(session)
        session.finish()
        after = _working(model)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert model.memory()["masters"] == 4 * count
        assert session.parts.optimizer.nbytes == 8 * count
        assert 4 * count < sum(before[name].numel() for name in before if "lora" not in name)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora" in name}
    norms = [
        row["adapter/update_norm"]
        for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")
        if row["step"] > 0
    ]
    assert norms[0] == 0
    assert norms[1:] == sorted(norms[1:])
    assert "adapter of rank 4" in about((tmp_path / "run" / "config.yaml").read_text())
    rewards = [
        row["reward/mean"]
        for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")
        if row["step"] > 0
    ]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, models: Path, family: str
) -> None:
    changes = {
        "family": family,
        "algorithm": {"kl_coefficient": 0.01},
        "evaluation": {"every": 2, "samples": 4},
    }
    whole = fingerprint(_run(tmp_path / "whole", models, **changes).run_dir)
    stopped = _run(tmp_path / "stopped", models, steps=2, **changes).run_dir
    assert fingerprint(stopped)["model.safetensors"] != whole["model.safetensors"]
    resume(stopped, ["steps=4"], quiet=True)
    assert fingerprint(stopped) == whole
    other = fingerprint(_run(tmp_path / "other", models, seed=1, **changes).run_dir)  # the control
    assert other["model.safetensors"] != whole["model.safetensors"]


def test_the_reference_is_the_model_without_its_adapter(tmp_path: Path, models: Path) -> None:
    """It has the bits of a frozen copy, so runs are the same; at the first step it is the policy,
    and it takes no memory. The copy is made where the reference's precision is said in another
    way."""
    copied = {"precision": {"preset": "fp8"}}
    shared = _run(tmp_path / "shared", models, algorithm={"kl_coefficient": 0.05})
    copy = _run(tmp_path / "copy", models, algorithm={"kl_coefficient": 0.05}, reference=copied)
    without = _run(tmp_path / "without", models)
    bits = [fingerprint(found.run_dir)["model.safetensors"] for found in (shared, copy, without)]
    assert bits[0] == bits[1]
    assert bits[0] != bits[2]
    assert [row["loss/kl"] for row in shared.metrics[-4:]] == [
        row["loss/kl"] for row in copy.metrics[-4:]
    ]
    assert shared.metrics[-4]["loss/kl"] == 0 < shared.metrics[-1]["loss/kl"]
    assert "memory/reference_mib" not in shared.metrics[-1]
    assert copy.metrics[-1]["memory/reference_mib"] > 0


def test_a_run_goes_on_from_a_folder(tmp_path: Path, models: Path) -> None:
    """`adapter.init`: the first step's policy is the folder's. It must be what the config says."""
    first = _run(tmp_path / "first", models).run_dir / "checkpoints" / "step-000004"
    config = _config(tmp_path / "second", models, adapter={**ADAPTER, "init": str(first)}, steps=1)
    with open_run(load_config(config), quiet=True) as session:
        found = session.parts.model.named_parameters()
        wanted = Model.load(models / "qwen3", "fp8", adapter=first).named_parameters()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert any(
            bool(parameter.any()) for name, parameter in found.items() if name.endswith("lora_B")
        )
    for key, value in (("rank", 8), ("alpha", 4), ("targets", ["q_proj"])):
        config = _config(
            tmp_path / key, models, adapter={**ADAPTER, "init": str(first), key: value}
        )
        with pytest.raises(
            IsobitError,
            match=r"adapter\.init: .* is an adapter of rank 4, alpha 8, on q_proj, k_proj",
        ):
            train(load_config(config), quiet=True)


@pytest.mark.slow
def test_a_dry_run_reads_prompts_as_the_run(tmp_path: Path, models: Path) -> None:
    """`adapter.init` is a run, whose checkpoint brings its own chat template, for RL and for
    supervised training. The control begins with a new adapter, and there is no template."""
    template = tmp_path / "chat.jinja"
    user = "{% if m.role == 'user' %}7*{{ m.content }}={% else %}{{ m.content }}{% endif %}"
    template.write_text(f"{{% for m in messages %}}{user}{{% endfor %}}")
    first_config = _config(tmp_path / "first", models, steps=1)
    given = load_config(first_config, [f"model.chat_template={template}"])
    first = train(given, quiet=True).run_dir
    chat = {"prompt": [{"role": "user", "content": "3"}], "answer": "21", "completion": "21"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(chat) + "\n")
    task: dict[str, Any] = {"path": str(tmp_path / "rows.jsonl"), "held_out_size": 0}
    config = _config(tmp_path / "second", models, adapter={**ADAPTER, "init": str(first)})
    off = ("evaluation.every=0",)
    changes = f"task={json.dumps(task)}", 'rewards.functions=["exact_match"]', *off
    assert dry_run_text(load_config(config, changes)).endswith("7*3=")
    supervised = {"task": task, "adapter": {**ADAPTER, "init": str(first)}, "steps": 1}
    blocks: list[str] = []
    path = {"model": {"path": str(models / "qwen3")}, "out": str(tmp_path / "sft")}
    supervised_dry_run(load_sft_config({**supervised, **path}, off), blocks.append)
    assert "7*3=" in blocks[-1]
    with pytest.raises(IsobitError, match="chat template"):
        dry_run_text(load_config(config, [*changes, "adapter.init=null"]))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fleet": (
        {"fleet": {"engines": 1}},
        "adapter: engines of a fleet take no adapters yet; set fleet.engines: 0",
    ),
    "rank": ({"adapter": {"rank": 0}}, r"adapter\.rank: expected at least 1, got 0"),
    "targets": (
        {"adapter": {"targets": ["q_prj"]}},
        r"adapter\.targets\.0: expected all-linear, q_proj",
    ),
    "both": ({"adapter": {"targets": ["all-linear", "q_proj"]}}, "give all-linear alone"),
    "none": ({"adapter": {"targets": []}}, "give all-linear alone, or some of"),
    "twice": ({"adapter": {"targets": ["q_proj", "q_proj"]}}, "one of them is there twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_config_may_not_ask_for(tmp_path: Path, models: Path, case: str) -> None:
    changes, line = REFUSED[case]
    with pytest.raises(IsobitError, match=line) as found:
        _run(tmp_path, models, **changes)
    assert "\n" not in str(found.value)


def test_the_path_of_an_adapter_is_no_model_to_train(tmp_path: Path, models: Path) -> None:
    Model.load(models / "qwen3", adapter=NewAdapter(4, 8)).save(tmp_path / "adapter")
    config = write_config(tmp_path, tmp_path / "adapter")
    with pytest.raises(
        IsobitError, match=r"is an adapter; give its model, and the adapter as adapter\.init"
    ):
        train(load_config(config), quiet=True)
    with pytest.raises(IsobitError, match="is an adapter itself"):
        train(load_config(config, ["adapter.rank=4"]), quiet=True)


def test_dry_run_and_plan_name_the_adapter(tmp_path: Path, models: Path) -> None:
    """And the dry run's masters are the adapter's; the control is a run without one."""
    config = _config(tmp_path, models)
    count = sum(
        p.numel() for p in Model.load(models / "qwen3", adapter=NewAdapter(4, 8)).parameters()
    )
    for arguments in (
        ["train", str(config), "--dry-run"],
        ["plan", str(config), "--device", "h200"],
    ):
        said = CliRunner().invoke(app, arguments)
        assert said.exit_code == 0, said.output
        assert "adapter of rank 4" in said.stdout
        assert f"{count:,}" in said.stdout
        without = CliRunner().invoke(app, [*arguments, "adapter=null"])
        assert "adapter" not in without.stdout
    assert (
        "FP32 masters, of the adapter"
        in CliRunner().invoke(app, ["train", str(config), "--dry-run"]).stdout
    )


@pytest.mark.slow
def test_a_rank_above_a_matrix_is_warned_of(tmp_path: Path, models: Path) -> None:
    """By whatever opens or plans a run, and in supervised training; the control is the smaller side
    itself."""
    config = _config(tmp_path, models)
    k_proj = targeted(Model.load(models / "qwen3").config, ["k_proj"])[0]
    sides = k_proj.hi - k_proj.lo, k_proj.inputs
    sft = tmp_path / "sft.yaml"
    sft.write_text(
        f"model: {models / 'qwen3'}\ntask: {{name: arithmetic, held_out_size: 4, options: "
        "{digits: 1}}\n"
        f"adapter: {{rank: 4}}\nsteps: 1\nbatch_size: 2\nout: {tmp_path / 'out'}\n"
    )
    commands = (
        ["train", str(config), "--dry-run"],
        ["plan", str(config), "--device", "h200"],
        ["train", str(config)],
    )
    for number, arguments in enumerate([*commands, ["sft", str(sft)]]):
        for rank in (min(sides) + 1, min(sides)):
            key = "out" if arguments[0] == "sft" else "run.dir"
            given = [
                f"adapter.rank={rank}",
                "adapter.targets=[k_proj]",
                f"{key}={tmp_path / f'{number} {rank}'}",
            ]
            said = CliRunner().invoke(app, [*arguments, *given])
            assert said.exit_code == 0, said.output
            line = (
                f"adapter.rank {rank} is above the smaller side of k_proj [{sides[0]}, {sides[1]}]"
            )
            assert (line in said.output) == (rank > min(sides)), said.output


@pytest.mark.slow
def test_commands_take_the_run_and_its_folder(tmp_path: Path, models: Path) -> None:
    """By `isobit`: train, then generate and evaluate with the run's directory, its checkpoint, and
    the model with it as the adapter; the control is the model alone."""
    config = _config(tmp_path, models, adapter=None)

    def output(*arguments: object) -> str:
        done = CliRunner().invoke(app, [*map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.stdout

    output("train", config, "adapter={rank: 4, alpha: 8}", "--quiet")
    run, base = tmp_path / "run", models / "qwen3"
    folder = run / "checkpoints" / "step-000004"
    asked = ["--prompt", "1+2=", "--prompt", "3+4=", "-n", "4", "--max-new-tokens", "8", "--json"]
    texts = [
        output("generate", *given, *asked)
        for given in ([run], [folder], [base, "--adapter", folder], [base])
    ]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert output("eval", run) == output("eval", run)


@pytest.mark.slow
def test_supervised_training_of_an_adapter(tmp_path: Path, models: Path) -> None:
    """Its folder is what an RL run goes on from; the control learns at a rate of almost nothing."""
    losses = {}
    for rate in (0.005, 1e-9):
        values = {
            "model": {"path": str(models / "qwen3")},
            "task": {
                "name": "arithmetic",
                "held_out_size": 4,
                "options": {"digits": 1, "train_size": 40},
            },
            "adapter": ADAPTER,
            "optimizer": {"learning_rate": rate},
            "steps": 20,
            "batch_size": 16,
            "out": str(tmp_path / f"sft {rate}"),
        }
        found = train_supervised(load_sft_config(values), quiet=True)
        model = Model.load(all_checkpoints(found.run_dir / "checkpoints")[-1], "fp8")
        assert model.transformer.adapter is not None
        ids = [
            [*model.tokenizer.encode(f"{a}+{b}={a + b}"), *model.tokenizer.eos_ids]
            for a in (2, 3)
            for b in (2, 3)
        ]
        losses[rate] = -sum(float(row[-2:].sum()) for row in model.logprobs(ids)) / len(ids)
    assert losses[0.005] < losses[1e-9] - 1
    path = _config(
        tmp_path / "rl", models, adapter={**ADAPTER, "init": str(tmp_path / "sft 0.005")}, steps=1
    )
    assert train(load_config(path), quiet=True).metrics[-1]["mismatch/differing_tokens"] == 0


def test_supervised_adapters_that_are_refused(tmp_path: Path, models: Path) -> None:
    with pytest.raises(IsobitError, match=r"random weights .* are no model to adapt"):
        load_sft_config({"model": {"init": {"hidden_size": 16}}, "adapter": ADAPTER})
    sft = tmp_path / "sft.yaml"
    sft.write_text(f"model: {models / 'qwen3'}\nadapter: {{rank: 4}}\ntask: arithmetic\n")
    config = load_config(
        write_config(tmp_path, models / "qwen3"), ["model.path=null", f"model.sft={sft}"]
    )
    with pytest.raises(
        IsobitError,
        match=r"trains an adapter; run isobit sft, and take its folder as adapter\.init",
    ):
        train(config, quiet=True)
