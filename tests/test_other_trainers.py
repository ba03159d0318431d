"""Every setting of a TRL or a verl run is on the page for those who come from there: with its home
here, or under "Not there" with what takes its place.

The names are read from the installed package, where there is one, and else from a list of a named
version (tests/other_trainers), which is compared with that version where it is installed.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config.aliases import counterpart
from tests.documents import ROOT
from tests.test_option_tables import quoted, rows

PAGES = {"trl": ROOT / "docs" / "from-trl.md", "verl": ROOT / "docs" / "from-verl.md"}
NOT_OF_GRPO_CONFIG = {"model", "train_dataset", "eval_dataset", "reward_funcs"} | {
    "tools",
    "environment_factory",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "lora_dropout",
    "use_rslora",
}
"""Of GRPOTrainer, and of ModelConfig."""
NOT_OF_THE_YAML = {
    "reward.reward_kwargs.overlong_buffer_cfg.len",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    "async_training.partial_rollout",
    "async_training.staleness_threshold",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.calculate_kv_scales",
    "actor_rollout_ref.actor.megatron.override_transformer_config.fp8",
    "actor_rollout_ref.actor.megatron.override_transformer_config.fp8_recipe",
}
"""Read by verl's reward manager, of a section that its files leave out, by its fully asynchronous
trainer, which has a file of its own, and by vLLM and Megatron, to whom verl hands sections."""

UNNAMED = "trust_remote_code"
"""The source may not even name it (tests/test_architecture.py)."""


def listed(trainer: str) -> list[str]:
    """The names of a list, whose first line says the version."""
    lines = (
        (Path(__file__).parent / "other_trainers" / f"{trainer}.txt")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    return [line for line in lines if not line.startswith("#")]


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{above}{key}.")
        elif key != "_target_":
            yield above + key


def installed(trainer: str) -> list[str] | None:
    """The names of the installed package, or None; verl's are read from its file, without importing
    it."""
    spec = importlib.util.find_spec(trainer)
    if spec is None or not spec.submodule_search_locations:
        return None
    if trainer == "trl":
        from trl import GRPOConfig

        return [field.name for field in dataclasses.fields(GRPOConfig)]
    file = (
        Path(spec.submodule_search_locations[0])
        / "trainer"
        / "config"
        / "_generated_ppo_trainer.yaml"
    )
    return list(leaves(yaml.safe_load(file.read_text(encoding="utf-8"))))


def on_page(page: Path, heading: str) -> list[str]:
    """The names in the first column of a table, values cut off; `.name` completed by the name
    before it. A value of the name before it, as in `loss_type="grpo"`, `"dapo"`, is none."""
    found: list[str] = []
    for theirs, *_ in rows(page, heading):
        names: list[str] = []
        for text in quoted(theirs):
            name = text.split("=")[0]
            if re.fullmatch(r"\.?[a-zA-Z][\w.]*(\.\*)?", name):
                names.append(
                    re.sub(r"\.\*$", "", names[-1]).rpartition(".")[0] + name
                    if name.startswith(".")
                    else name
                )
        assert names, theirs
        found += names
    return found


def missing(names: Iterable[str], page: list[str]) -> list[str]:
    """Which of the names a page does not have; `section.*` has all of a section."""
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in page)]


@pytest.mark.parametrize("trainer", PAGES)
def test_every_setting_has_a_row(trainer: str) -> None:
    page = [*on_page(PAGES[trainer], "Options"), *on_page(PAGES[trainer], "Not there")]
    names = installed(trainer) or listed(trainer)
    assert len(names) > 150
    assert missing(names, page) == []
    without = [name for name in page if name not in ("beta", "algorithm.gamma")]  # the control
    assert missing(names, without) == [{"trl": "beta", "verl": "algorithm.gamma"}[trainer]]


@pytest.mark.parametrize("trainer", PAGES)
def test_every_row_is_of_a_setting_that_exists(trainer: str) -> None:
    """Of the version that is listed: newer ones lose some."""
    names = (
        {*listed(trainer), *NOT_OF_GRPO_CONFIG}
        if trainer == "trl"
        else {*listed(trainer), *NOT_OF_THE_YAML}
    )
    page = [*on_page(PAGES[trainer], "Options"), *on_page(PAGES[trainer], "Not there")]
    values = {
        "remax",
        "grpo_passk",
        "gspo",
        "cispo",
        "seq_sum_k1",
    }  # of the name before them
    unknown = [
        p for p in page if p not in values and not any(fnmatchcase(name, p) for name in names)
    ]
    assert unknown == []


@pytest.mark.parametrize(("trainer", "of"), [("trl", "1.16.0"), ("verl", "0.9.1")])
def test_the_list_is_what_its_version_has(trainer: str, of: str) -> None:
    names = installed(trainer)
    if (
        names is None
        or version(trainer) != of
        or (trainer == "trl" and version("transformers") != "5.24.0")
    ):
        pytest.skip(f"{trainer} {of} is not installed")
    assert sorted(names) == listed(trainer)


@pytest.mark.parametrize("trainer", PAGES)
def test_what_is_not_there_is_told_as_such(trainer: str) -> None:
    """The message about an unknown key takes it for no key of ours, and knows every name of
    TRL's."""
    told_elsewhere = set(
        on_page(PAGES[trainer], "Options")
    )  # a name of which some values are there
    for name in on_page(PAGES[trainer], "Not there"):
        if name in told_elsewhere or name.endswith("*") or name == UNNAMED:
            continue
        known, key = counterpart(name)
        assert key is None, f"{name}: {key}"
        assert known or trainer != "trl", f"{name}: name it in config/aliases.py"
