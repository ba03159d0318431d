"""Strict configuration: what is accepted, and the one line for what is not."""

from pathlib import Path

import pytest
import yaml

from isobit.config import Config, SftConfig, dump_config, load_config, load_sft_config, parse_config
from isobit.config.__main__ import markdown
from isobit.errors import IsobitError

MINIMAL = "model: {path: base}\n"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def test_overrides_are_yaml_and_the_dump_reads_back_equal(config_file: Path) -> None:
    overrides = [
        "sampling.temperature=0.5",
        "steps=7",
        "sampling.stop=[a, b]",
        "precision.wgrad=bf16",
        "task.name=gsm8k",
    ]
    config = load_config(config_file, ["precision=fp8", *overrides])
    assert config.sampling.temperature == 0.5
    assert config.steps == 7
    assert config.sampling.stop == ("a", "b")
    assert config.precision == {"preset": "fp8", "wgrad": "bf16"}
    assert parse_config(Config, yaml.safe_load(dump_config(config)), "dump") == config


def test_configs_are_frozen(config_file: Path) -> None:
    config = load_config(config_file)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.temprature=1", "unknown key 'sampling.temprature' (did you mean 'temperature'?)"),
        ("stesp=1", "unknown key 'stesp' (did you mean 'steps'?)"),
        ("rewards.functions=[{function: 'a:b', wieght: 2}]", "(did you mean 'weight'?)"),
        ("steps=0", "steps: input should be greater than or equal to 1, got 0"),
        ("steps=many", "steps: input should be a valid integer"),
        ("sampling.temperature=-1", "sampling.temperature: input should be greater than 0, got -1"),
        ("sampling.temperature=.nan", "sampling.temperature:"),
        ("precision=fp9", "did you mean 'fp8'"),
        ("precision={preset: fp8, wgrad: int8}", "precision.wgrad"),
        ("precision={preset: fp8, activation_granularity: tensor}", "consistency: bitwise cannot hold"),
        ("reference.precision=fp7", "unknown precision preset 'fp7'"),
        ("sampling.top_p=0.9", "cannot be used in training"),
        ("sampling.group_size=1", "at least 2"),
        ("model.path=null", "exactly one of path"),
        ("model.sft=x", "exactly one of path"),
        ("algorithm.overlong_buffer=128", "below sampling.max_new_tokens"),
        ("algorithm={correction: token_tis, recompute_old_logprobs: never}", "makes equal"),
        ("algorithm.correction={weight: token, cap: 1, floor: 2}", "floor 2.0 exceeds cap 1.0"),
        ("algorithm.kl_in_reward=true", "needs a kl_coefficient above 0"),
        ("algorithm={kl_coefficient: 0.1, kl_estimator: k1}", "take k2 or k3"),
        ("algorithm={preset: cispo, dual_clip: 3}", "leave one of them out"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip: input should be greater than 1"),
        ("algorithm.correction={cap: 2}", "need a weight"),
        ("algorithm.correction={}", "an empty correction"),
        ("algorithm.correction={rejection: {measure: k3}}", "give low, high, or both"),
        ("algorithm.correction={rejection: {low: 2, high: 1}}", "low 2.0 must be below high 1.0"),
        ("algorithm.correction={wieght: token}", "did you mean 'weight'"),
        ("algorithm.correction=token_tsi", "token_tis"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
        ("backend=cuda", "backend: input should be 'auto', 'triton', 'native' or 'reference'"),
        ("steps", "expected key.sub=value"),
        ("steps.x=1", "valid integer"),
    ],
)
def test_a_mistake_gives_one_line(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(IsobitError) as error:
        load_config(config_file, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1,\n", "line 2: not valid YAML"), ("- 1\n", "expected a mapping"), ("{}", "model: required, but not given")],
)
def test_a_malformed_file_gives_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(IsobitError) as error:
        load_config(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(IsobitError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_sft_configs_are_read_by_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("model: {init: {hidden_size: 64}}\ntask: {name: arithmetic}\n")
    config = load_sft_config(path, ["model.init.num_layers=2"])
    assert config.model.init is not None
    assert config.model.init.num_layers == 2
    assert parse_config(SftConfig, yaml.safe_load(dump_config(config)), "dump") == config
    with pytest.raises(IsobitError, match="did you mean 'num_layers'"):
        load_sft_config(path, ["model.init.num_layer=2"])


def test_the_document_is_what_the_code_prints() -> None:
    """And every key is in it, with no type that only Python would understand."""
    text = (Path(__file__).parents[1] / "docs" / "config.md").read_text(encoding="utf-8")
    assert text == markdown()
    for key in ("algorithm.correction.rejection.measure", "optimizer.betas", "model.init.head_dim", "run.keep_last"):
        assert f"| `{key}` |" in text
    assert "typing." not in text
    assert "<class" not in text
