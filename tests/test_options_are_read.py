"""A declared option that no code reads is a mistake: a user would set it, and nothing would follow.

Small runs are made under every kind of setting, and each read of an option is noted that isobit's
own code makes, apart from declaring, checking, comparing and printing it.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest

import isobit
from isobit import resume, train
from isobit.config import (
    CompareConfig,
    Config,
    SftConfig,
    load_compare_config,
    load_config,
    load_sft_config,
)
from isobit.options.declare import options_of, plain, sections
from isobit.training.commands.compare import compare
from isobit.training.train import train_supervised
from tests.runs import write_config
from tests.training.test_scoring import reward_model
from tests.training.test_turns import config_of, save_chat_model

SOURCE = Path(isobit.__file__).parent
NO_READERS = (str(SOURCE / "config"), str(SOURCE / "options"))
# goes to the trackers' processes as a mapping, and is read there by name
TRACKING = "isobit.monitor.trackers.settings"
NOT_BY_A_RUN = {
    "Objective.preset",  # its parts are
    # by a fleet, whose runs need Ray (tests/fleet)
    "FleetSettings.cluster",
    "FleetSettings.cpus_per_engine",
    "FleetSettings.gpus_per_engine",
    "FleetSettings.deadline_s",
    "EnvironmentConfig.max_tokens",  # by the config itself: `Config.most_tokens`
    # by an MCP server (tests/environments)
    "McpServer.command",
    "McpServer.environment",
}
Key = tuple[type, str]


def all_sections(schema: type, found: list[type]) -> list[type]:
    """The dataclass and those in it."""
    if schema not in found:
        found.append(schema)
        for option in options_of(schema).values():
            for section in sections(option.kind):
                all_sections(section, found)
    return found


def declared(*schemas: type) -> list[type]:
    found: list[type] = []
    for schema in schemas:
        all_sections(schema, found)
    return found


class Reads:
    """Notes which options of dataclasses are read by whom it counts as code."""

    def __init__(self, source: str) -> None:
        self.source, self.seen = source, set[Key]()

    def watch(self, schema: type, monkeypatch: pytest.MonkeyPatch) -> None:
        names, seen = frozenset(options_of(schema)), self.seen

        def read(value: Any, name: str) -> Any:
            if name in names and (schema, name) not in seen:
                code = sys._getframe(1).f_code
                ours = code.co_filename.startswith(self.source) and not code.co_filename.startswith(
                    NO_READERS
                )
                if ours and code.co_name != "__post_init__":
                    seen.add((schema, name))
            return object.__getattribute__(value, name)

        monkeypatch.setattr(schema, "__getattribute__", read)


def unread(schemas: list[type], reads: Reads) -> list[str]:
    by_name = "".join(
        path.read_text(encoding="utf-8") for path in (SOURCE / "monitor" / "trackers").glob("*.py")
    )
    keys = [
        (schema, name)
        for schema in schemas
        for name in options_of(schema)
        if (schema, name) not in reads.seen
    ]
    return [
        f"{s.__name__}.{name}"
        for s, name in keys
        if s.__module__ != TRACKING or f'"{name}"' not in by_name
    ]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads(str(SOURCE))
    for schema in declared(Config, SftConfig, CompareConfig):
        found.watch(schema, monkeypatch)
    return found


RULE = "{weight: token, cap: 2, veto: 1e-5, rejection: {measure: k3, level: token, high: 9}}"
RUNS = (
    (
        "evaluation={every: 1, samples: 4, num_samples: 2}",
        "replay={capacity: 8, groups_per_step: 2}",
    ),
    ("precision=fp8-rollout", f"algorithm={{correction: {RULE}, updates_per_batch: 2}}"),
    (
        "algorithm={preset: dapo, kl_coefficient: 0.1, kl_in_reward: true, overlong_buffer: 1, "
        "decoupled_rewards: true, entropy_target: 9}",
    ),
    (
        "adapter={rank: 2, targets: [q_proj]}",
        "algorithm.preset=vespo",
        "partial.tokens_per_round=1",
    ),
    ("optimizer={name: muon}", "serve.port=0"),
    ("curriculum.mode=skip", "task.options={digits: 1, train_size: 4}"),
    (
        "algorithm={advantage: distillation, kl_coefficient: 1, kl_in_reward: true, "
        "loss: divergence, divergence_beta: 0.5, divergence_top_k: 3}",
        "reference={shown: {success: 0.3, template: '{prompt}{shown}'}, sync_every: 1, "
        "sync_alpha: 0.5}",
    ),
    (
        "algorithm={preset: reinforce_pp, loss: sapo, kl_coefficient: 0.1, "
        "off_policy_mask_threshold: 0.1}",
        "optimizer={schedule: cosine, warmup_steps: 1}",
    ),
)


def make_runs(folder: Path, base_model: Path) -> None:
    """Runs of one or two steps, which between them use every option."""
    for i, overrides in enumerate(RUNS):
        (folder / str(i)).mkdir()
        given = ["steps=2", f"serve.token={folder / 'tokens'}", *overrides]
        train(load_config(write_config(folder / str(i), base_model), given))
    resume(folder / "0" / "run", ["steps=3"])
    train(load_config(config_of(folder / "turns", save_chat_model(folder / "chat")), ["steps=1"]))
    judge = str(reward_model(folder / "judge"))
    (folder / "sft.yaml").write_text(
        "model: {init: {hidden_size: 16, num_layers: 1}}\ntask: arithmetic\nsteps: 1\n"
    )
    (folder / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{i}+1=", "completion": "{i + 1}"}}\n' for i in (*range(20), 12345))
    )
    rows = {
        "files": [{"path": str(folder / "rows.jsonl"), "weight": 1}],
        "held_out_size": 2,
        "max_prompt_tokens": 5,
        "too_long": "drop",
    }
    new = {
        "vocabulary": "0123456789+=",
        "hidden_size": 16,
        "num_layers": 1,
        "family": "qwen3_moe",
        "num_experts": 2,
    }
    greedy = {
        "model": {"init": {"hidden_size": 16, "num_layers": 1}},
        "task": "arithmetic",
        "evaluation": {"samples": 2},
    }
    train_supervised(load_sft_config({**greedy, "out": str(folder / "greedy"), "steps": 1}))
    train_supervised(
        load_sft_config(
            {
                "model": {"init": new},
                "task": rows,
                "out": str(folder / "sft"),
                "batch_size": 2,
                "steps": 1,
            }
        ),
        quiet=True,
    )
    resume(folder / "sft", ["steps=2"])
    (folder / "labels.jsonl").write_text(
        "".join(f'{{"prompt": "{i}+1=", "completion": "{i}", "label": false}}\n' for i in range(4))
    )
    labels = {
        "model": str(base_model),
        "loss": "kto",
        "task": {"path": str(folder / "labels.jsonl"), "held_out_size": 0},
        "reference": {"sync_every": 1, "sync_alpha": 0.5},
        "out": str(folder / "kto"),
        "batch_size": 2,
        "steps": 1,
    }
    train_supervised(load_sft_config(labels), quiet=True)
    config = write_config(folder, base_model, steps=1, rewards={"models": [{"path": judge}]})
    changes = ["model={sft: " + str(folder / "sft.yaml") + "}"]
    compare(load_compare_config(config, ["bf16"], 1, str(folder / "compare"), changes))


@dataclass(frozen=True)
class Planted:
    """A section with an option that nothing reads."""

    path: Annotated[str, "a path"] = "here"
    forgotten: Annotated[int, "a number"] = 0


@pytest.mark.slow
def test_every_option_is_read(
    tmp_path: Path, base_model: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "cache"))
    make_runs(tmp_path, base_model)
    assert set(unread(declared(Config, SftConfig, CompareConfig), reads)) == NOT_BY_A_RUN


def test_an_option_that_nothing_reads_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: reads by this file count here; comparing, printing and copying do not count as
    reading."""
    found = Reads(str(Path(__file__).parent))
    found.watch(Planted, monkeypatch)
    value = Planted()
    assert (value.path, value, plain(value)["forgotten"], replace(value)) == (
        "here",
        Planted(),
        0,
        value,
    )
    assert unread([Planted], found) == ["Planted.forgotten"]
