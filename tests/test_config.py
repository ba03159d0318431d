"""Strict configuration: what is accepted, and the one line for what is not."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit import Precision
from isobit.cli.app import names
from isobit.config import Config, SftConfig, dump_config, load_config, load_sft_config, parse_config
from isobit.config.__main__ import markdown
from isobit.config.reading import read_source
from isobit.data import strict_yaml
from isobit.errors import IsobitError
from isobit.options import reading
from isobit.precision import precision_from
from isobit.precision.flow import Flow

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
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "sampling.temprature=1",
            "unknown key 'sampling.temprature' (did you mean 'sampling.temperature'?)",
        ),
        ("stesp=1", "unknown key 'stesp' (did you mean 'steps'?)"),
        (
            "rewards.functions=[{function: 'a:b', wieght: 2}]",
            "(did you mean 'rewards.functions.weight'?)",
        ),
        ("steps=0", "steps: expected at least 1, got 0"),
        ("steps=many", "steps: expected a whole number, got 'many'"),
        ("sampling.temperature=-1", "sampling.temperature: expected at least 0.001, got -1"),
        ("sampling.temperature=.nan", "sampling.temperature:"),
        ("precision=fp9", "did you mean 'fp8'"),
        ("precision={preset: fp8, wgrad: int8}", "precision.wgrad"),
        (
            "precision={preset: fp8, activation_granularity: tensor}",
            "consistency: bitwise cannot hold",
        ),
        ("reference.precision=fp7", "unknown precision preset 'fp7'"),
        ("sampling.top_p=1.1", "sampling.top_p: expected at most 1"),
        ("sampling.group_size=1", "at least 2"),
        ("model.path=null", "exactly one of path"),
        ("model.sft=x", "exactly one of path"),
        ("algorithm.overlong_buffer=128", "below sampling.max_new_tokens"),
        ("algorithm={correction: token_tis, recompute_old_logprobs: never}", "makes equal"),
        ("algorithm.correction={weight: token, cap: 1, floor: 2}", "floor 2.0 exceeds cap 1.0"),
        ("algorithm.kl_in_reward=true", "needs a kl_coefficient above 0"),
        ("algorithm={kl_coefficient: 0.1, kl_estimator: k1}", "take k2 or k3"),
        (
            "algorithm={kl_coefficient: 0.1, kl_in_reward: true, kl_estimator: k3-unbiased}",
            "which a reward has not",
        ),
        ("algorithm={preset: cispo, dual_clip: 3}", "leave one of them out"),
        ("algorithm={loss: reinforce, dual_clip: 3}", "reinforce has no such clip"),
        ("algorithm={preset: gmpo, dual_clip: 3}", "gmpo has no such clip"),
        ("algorithm={preset: gmpo, ratio: sequence}", "has no meaning under loss: gmpo"),
        ("algorithm={loss: dppo_kl, ratio: sequence_sum}", "has no meaning under loss: dppo_kl"),
        ("algorithm={advantage: maxrl, overlong_buffer: 2}", "maxrl needs rewards of 0 and more"),
        (
            "algorithm={advantage: maxrl, kl_coefficient: 0.1, kl_in_reward: true}",
            "maxrl needs rewards of 0 and more",
        ),
        ("algorithm.dual_clip=1", "algorithm.dual_clip: expected above 1"),
        ("algorithm.correction={cap: 2}", "need a weight"),
        ("algorithm.correction={}", "an empty correction"),
        ("algorithm.correction={weight: token, denominator: kept}", "needs a rejection or a veto"),
        ("algorithm.correction={rejection: {measure: k3}}", "give low, high, or both"),
        ("algorithm.correction={rejection: {low: 2, high: 1}}", "low 2.0 exceeds high 1.0"),
        ("algorithm.correction={wieght: token}", "did you mean 'algorithm.correction.weight'"),
        ("algorithm.correction=token_tsi", "token_tis"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
        ("backend=cuda", "backend: expected auto, triton, native or reference, got 'cuda'"),
        ("steps", "expected key.sub=value"),
        ("steps.x=1", "steps: expected a whole number"),
        ("steps=true", "steps: expected a whole number, got true"),
        ("optimizer.betas=0.9", "optimizer.betas: expected a list, such as [a, b], got 0.9"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected a list of 2, got [0.9]"),
        (
            "sampling=5",
            "sampling: expected a section of keys, such as {max_new_tokens: ..., temperature: "
            "...}, got 5",
        ),
        ("algorithm.loss=[clip]", "algorithm.loss: expected clip, cispo, reinforce, sapo, gmpo, "),
        ("algorithm.preset=true", "algorithm.preset: expected grpo, "),
        (
            "algorithm.correction={weight: null}",
            "algorithm.correction.weight: expected none, token or sequence, got",
        ),
        (
            "algorithm={surrogate: cispo}",
            "unknown key 'algorithm.surrogate' (did you mean 'algorithm.loss'?)",
        ),
        ("algorithm.epochs=null", "algorithm.epochs: expected a whole number, got nothing"),
        (
            "sampling.temperature=0.0005",
            ": sampling.temperature: expected at least 0.001, got 0.0005",
        ),
        ("sampling.stop=['']", ": sampling.stop: expected texts that are not empty, got ['']"),
        (
            "sampling.max_new_tokens=2147483648",
            "sampling.max_new_tokens: expected below 2,147,483,648",
        ),
        ("evaluation.temperature=0.0005", "evaluation.temperature: expected at least 0.001"),
        ("sampling.stop=5", "sampling.stop.0: expected text, got 5"),
        ("task.columns=[q]", "task.columns: expected a mapping, such as {name: value}"),
        ("task.columns={prompt: 1}", "task.columns.prompt: expected text, got 1"),
        (
            "precision=5",
            "precision: expected text or a mapping, such as {preset: fp8, wgrad: bf16}, got 5",
        ),
        ("evaluation.keep_best=maybe", "evaluation.keep_best: expected true or false, got 'maybe'"),
        (
            "model=null",
            "model: expected a section of keys, such as {path: ..., sft: ...}, got nothing",
        ),
        ("task.options={digits: 1, digits: 2}", "key 'digits' comes twice; leave one"),
        ("precision=fp8[wgrad=bf16, wgrad=fp8]", "option 'wgrad' comes twice"),
        ("lr=1", "unknown key 'lr' (did you mean 'optimizer.learning_rate'?)"),
        (
            "num_generations=4",
            "unknown key 'num_generations' (did you mean 'sampling.group_size'?)",
        ),
        ("group_size=4", "unknown key 'group_size' (did you mean 'sampling.group_size'?)"),
        (
            "actor_rollout_ref={rollout: {n: 3}}",
            "'actor_rollout_ref.rollout.n' (did you mean 'sampling.group_size'?)",
        ),
        ("use_vllm=true", "unknown key 'use_vllm': isobit has no counterpart of it"),
        ("tempreture=1", "unknown key 'tempreture' (did you mean 'sampling.temperature'?)"),
        ("zzz=1", "unknown key 'zzz'; known here: model, task"),
        ("STEPS=1", "unknown key 'STEPS' (did you mean 'steps'?)"),
        (
            "rewards.functions.0.weight=2",
            "rewards.functions is a list, which is given whole: rewards.functions=[...]",
        ),
        ("sampling.stop.0=a", "sampling.stop is a list, which is given whole: sampling.stop=[...]"),
        ("optimizer.betas.1=0.9", "optimizer.betas is a list, which is given whole"),
    ],
)
def test_a_mistake_gives_one_line(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(IsobitError) as error:
        load_config(config_file, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_section_does_not_drop_its_keys(config_file: Path) -> None:
    """Which were given before it; after it they change it, and the last of two is taken."""
    section, key = "sampling={top_k: 3, group_size: 2}", "sampling.top_k=4"
    with pytest.raises(
        IsobitError, match=r"takes the place of 'sampling.top_k=4'.*give sampling first"
    ):
        load_config(config_file, [key, section])
    assert load_config(config_file, [section, key]).sampling.top_k == 4
    assert load_config(config_file, [key, "sampling.top_k=5"]).sampling.top_k == 5


def test_a_dotted_key_in_a_file_is_told_where_it_stands(config_file: Path) -> None:
    config_file.write_text(config_file.read_text() + "\nengine.kv_pages: 3\n")
    with pytest.raises(IsobitError, match=r"'engine.kv_pages': .* engine: \{kv_pages: \.\.\.\}"):
        load_config(config_file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1,\n", "line 2: not valid YAML"),
        ("- 1\n", "expected a mapping"),
        ("{}", "model: required, but not given"),
    ],
)
def test_a_malformed_file_gives_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(IsobitError) as error:
        load_config(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {path: base}\nsteps: 2\nsampling:\n  top_k: 0\nsteps: 3\n",
            "line 5: key 'steps' was given before, in line 2",
        ),
        (
            "model: {path: base}\nsampling:\n  top_k: 0\n\n  top_k: 1\n",
            "line 5: key 'sampling.top_k' was given before, in line 3",
        ),
        (
            "model: {path: base, path: other}\n",
            "line 1: key 'model.path' was given before, in line 1",
        ),
        (
            "model: base\nrewards: {functions: [{function: math, weight: 1,\n weight: 2}]}\n",
            "line 3: key 'rewards.functions.weight' was given before, in line 2; leave one",
        ),
        (
            'model: base\ntask:\n  columns:\n    1: a\n    "1": b\n',
            "line 5: key 'task.columns.1' was given before, in line 4; leave one",
        ),
    ],
)
def test_a_key_that_comes_twice_is_refused_with_both_lines(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(IsobitError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}, line ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("number", "base"), [("010", 8), ("-007", 8), ("0_1", 8), ("1:30", 60), ("1:30.5", 60)]
)
def test_a_number_that_is_not_what_it_looks_like_is_refused(
    tmp_path: Path, number: str, base: int
) -> None:
    """YAML reads 010 as 8, and 1:30 as 90. The controls: in quotes, and on the command line, where
    what is no YAML is text, it is what it looks like; and other numbers are numbers."""
    path = tmp_path / "run.yaml"
    path.write_text(f"model: base\nseed: {number}\n")
    with pytest.raises(IsobitError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}, line 2: not valid YAML: {number} is a number of base {base} in YAML; write it in "
        "decimals, or in quotes"
    )
    path.write_text("model: base\nseed: '010'\n")
    assert load_config(path).seed == load_config({"model": "base"}, ["seed=010"]).seed == 10
    assert strict_yaml.load("[0, -0, 10, 0.5, 0x10, 1_0]") == [0, 0, 10, 0.5, 16, 10]


def test_a_key_that_a_merge_brings_may_be_given_again(tmp_path: Path) -> None:
    """The control: the same key in two mappings is no repetition."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: base}\nsampling: &s {top_k: 0, temperature: 2}\nengine: {kv_pages: 3}\n"
        "steps: 2\n"
    )
    assert load_config(path).steps == 2
    both = "base: &base {<<: {x: 1}, x: 2, y: 3}\nmore: {<<: *base, x: 4}\nlist: [{a: 1}, {a: 2}]\n"
    assert strict_yaml.load(both)["more"] == {"x": 4, "y": 3}


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("model=other", "model.path=other"),
        ("task=data.jsonl", "task.path=data.jsonl"),
        ("task=arithmetic", "task.name=arithmetic"),
        ("rewards=exact_match", "rewards.functions=[{function: exact_match}]"),
        (
            "rewards=[exact_match, 'my.py:f']",
            "rewards.functions=[{function: exact_match}, {function: 'my.py:f'}]",
        ),
        (
            "rewards.functions={function: exact_match, weight: 2}",
            "rewards.functions=[{function: exact_match, weight: 2}]",
        ),
        ("rewards.models=judge", "rewards.models=[{path: judge}]"),
        ("sampling.stop=END", "sampling.stop=[END]"),
        ("tracking.trackers=wandb", "tracking.trackers=[wandb]"),
        ("evaluation={pass_at: 4, num_samples: 4}", "evaluation={pass_at: [4], num_samples: 4}"),
    ],
)
def test_a_short_form_means_what_it_says(config_file: Path, short: str, long: str) -> None:
    assert (
        load_config(config_file, [short])
        == load_config(config_file, [long])
        != load_config(config_file)
    )


def test_a_step_has_at_most_as_many_updates_as_completions() -> None:
    values = {"model": {"path": "m"}, "prompts_per_step": 2, "sampling": {"group_size": 3}}
    config = parse_config(Config, {**values, "algorithm": {"updates_per_batch": 6}}, "a test")
    assert config.algorithm.updates_per_batch == 6
    with pytest.raises(IsobitError, match=r"updates_per_batch exceeds the completions of a step"):
        parse_config(Config, {**values, "algorithm": {"updates_per_batch": 7}}, "a test")


def test_a_mapping_is_a_config_as_its_file_is(tmp_path: Path) -> None:
    """In Python: nested or dotted keys, paths and precisions as objects; the caller's mapping stays
    as it is."""
    settings = {
        "model": {"path": Path("base")},
        "sampling.group_size": 4,
        "sampling": {"stop": ("a", "b")},
        "precision": precision_from("fp8[wgrad=bf16]"),
    }
    settings = {"model": settings.pop("model"), "sampling": settings.pop("sampling"), **settings}
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {path: base}\nsampling: {group_size: 4, stop: [a, b]}\nprecision: "
        "fp8[wgrad=bf16]\nsteps: 3\n"
    )
    assert load_config(settings, ["steps=3"]) == load_config(file) == load_config(load_config(file))
    assert settings["sampling"] == {"stop": ("a", "b")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "config: expected the path of a YAML file or a mapping of settings, got 3"),
        ({"model": "base", "stesp": 1}, "settings: unknown key 'stesp' (did you mean 'steps'?)"),
        ({"model": "base", 3: 1}, "settings: a key must be text, got 3"),
        (
            {"model": "base", "rewards": {"functions": [len]}},
            "reward functions go into train(..., rewards=[f])",
        ),
        (
            {"model": "base", "steps": object()},
            "settings: steps: expected text, numbers, lists or mappings, got object",
        ),
        (
            {"model": "base", "precision": Precision("mine", Flow(), Flow())},
            "'mine' names no flow equal to this one",
        ),
        (
            {"model": "base", "model.path": "other"},
            "settings: 'model.path': model is not a section of keys",
        ),
        ({}, "settings: model: required, but not given"),
    ],
)
def test_a_mapping_that_is_no_config_gives_one_line(given: Any, message: str) -> None:
    with pytest.raises(IsobitError) as caught:
        load_config(given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("short", "override", "section"),
    [
        ("model: base", "model.path=other", {"model": {"path": "other"}}),
        ("model: base", "model.chat_template=t.jinja",
            {"model": {"path": "base", "chat_template": "t.jinja"}}),
        ("task: gsm8k", "task.max_prompt_tokens=9",
            {"task": {"name": "gsm8k", "max_prompt_tokens": 9}}),
        ("task: rows.jsonl", "task.held_out_size=3",
            {"task": {"path": "rows.jsonl", "held_out_size": 3}}),
        ("rewards: [math]", "rewards.num_workers=3",
            {"rewards": {"functions": ["math"], "num_workers": 3}}),
        ("precision: fp8[wgrad=bf16]", "precision.kv_cache=bf16",
            {"precision": "fp8[wgrad=bf16, kv_cache=bf16]"}),
    ],
)  # fmt: skip
def test_an_override_says_more_of_a_short_form(
    tmp_path: Path, short: str, override: str, section: Any
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{short}\n" + ("" if short.startswith("model") else "model: base\n"))
    found, wanted = load_config(file, [override]), load_config({"model": "base", **section})
    assert dataclasses.replace(found, precision="") == dataclasses.replace(wanted, precision="")
    assert precision_from(found.precision).formats() == precision_from(wanted.precision).formats()
    assert load_config(file) != found, "the control: without the override"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "precision=nvfp4[activation=bf16,",
            "its [ is not closed; expected precision=PRESET[option=value, option=value]",
        ),
        (
            "reference.precision=fp8[wgrad=bf16",
            "its [ is not closed; expected reference.precision=PRESET[",
        ),
        (
            "precision={preset: 'fp8[wgrad=bf16'}",
            "no ] at its end; expected PRESET[option=value, option=value]",
        ),
    ],
)
def test_a_precision_that_a_shell_has_cut_gives_one_line(
    config_file: Path, override: str, line: str
) -> None:
    """Before the rest of it, which is no key."""
    with pytest.raises(IsobitError) as caught:
        load_config(
            config_file,
            [override, "kv_cache=int8]"]
            if override.startswith("p") and "," in override
            else [override],
        )
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("fp8-e2e[rollout={weight: bf16, activation: bf16}]", None),
        ("fp8-e2e[rollout={activation: bf16}]", None),
        ('math:{"tolerance": 1}', None),
        ("fp8[bf16_layers=[o, down]]", None),
        ("[fp8-e2e[rollout={a: b, c: d}], fp8]", ["fp8-e2e[rollout={a: b, c: d}]", "fp8"]),
        ("{preset: fp8[wgrad=bf16]}", {"preset": "fp8[wgrad=bf16]"}),
        ("[{path: m, precision: fp8[wgrad=bf16]}]", [{"path": "m", "precision": "fp8[wgrad=bf16]"}]),
        ("Say it[now] to me", None),
        # controls: what YAML has a value for
        ("{name: x, options:{digits: 2}}", {"name": "x", "options": {"digits": 2}}),
        ("a: {b: 1}", {"a": {"b": 1}}),
        ('["a, b[c]"]', ["a, b[c]"]),
        ("[1, [2]]", [1, [2]]),
    ],
)  # fmt: skip
def test_a_name_with_brackets_is_text_in_an_override(typed: str, value: Any) -> None:
    values, _ = read_source({}, [f"x={typed}"])
    assert values == {"x": typed if value is None else value}


def test_a_precision_of_the_command_line_is_that_of_a_mapping(config_file: Path) -> None:
    sides = {"rollout": {"weight": "bf16", "activation": "bf16"}}
    typed = "precision=fp8-e2e[rollout={weight: bf16, activation: bf16}]"
    for word in (typed, typed.replace("=", "= ", 1) + " "):
        found = precision_from(load_config(config_file, [word]).precision)
        assert found == precision_from({"preset": "fp8-e2e", **sides})
    assert found != precision_from("fp8-e2e"), "the control"


def test_a_precision_of_a_file_needs_quotes_and_the_message_says_so(config_file: Path) -> None:
    """The controls: in quotes it is read, and another mistake gets no such advice."""
    text, flow = config_file.read_text(), "fp8-e2e[rollout={weight: bf16, activation: bf16}]"
    for value, said in ((flow, "in it needs quotes around it"), ("]", "not valid YAML")):
        config_file.write_text(f"{text}\nprecision: {value}\n")
        with pytest.raises(IsobitError, match=said) as refused:
            load_config(config_file)
        assert ("quotes" in str(refused.value)) == (value == flow)
    config_file.write_text(f'{text}\nprecision: "{flow}"\n')
    assert load_config(config_file).precision == flow


def test_names_between_commas_keep_their_brackets() -> None:
    assert names("fp8[wgrad=bf16, bf16_layers=[o, qkv]], bf16,") == [
        "fp8[wgrad=bf16, bf16_layers=[o, qkv]]",
        "bf16",
    ]


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
    with pytest.raises(IsobitError, match=r"did you mean 'model\.init\.num_layers'"):
        load_sft_config(path, ["model.init.num_layer=2"])


def test_the_document_is_what_the_code_prints() -> None:
    """And every key is in it, with no type that only Python would understand."""
    text = (Path(__file__).parents[1] / "docs" / "config.md").read_text(encoding="utf-8")
    assert text == markdown()
    for key in (
        "algorithm.correction.rejection.measure",
        "optimizer.betas",
        "model.init.head_dim",
        "run.keep_last",
    ):
        assert f"| `{key}` |" in text
    assert "typing." not in text
    assert "<class" not in text


def test_a_key_that_was_renamed_takes_its_old_name_with_a_warning(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controls: the new name warns of nothing, and both together are a mistake."""
    path = config_file
    reading.say_renamed.cache_clear()
    new = load_config(path, ["optimizer.gradient_sum_group=8"])
    assert capsys.readouterr().err == ""
    assert load_config(path, ["optimizer.sum_group=8"]) == new
    warning = "warning: optimizer.sum_group is called gradient_sum_group now"
    assert capsys.readouterr().err.startswith(warning)
    assert "sum_group: 8" in dump_config(new)
    with pytest.raises(IsobitError, match=r"optimizer\.sum_group: is called gradient_sum_group"):
        load_config(path, ["optimizer.sum_group=8", "optimizer.gradient_sum_group=8"])
