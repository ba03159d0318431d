"""Rows with tools, calls, weights and ends, as the field writes them: what is learned of each."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isobit.data.dataset import Dataset, Shaping, read_examples
from isobit.data.readers import Source
from isobit.errors import IsobitError
from isobit.model import Tokenizer
from isobit.tasks.builtin import Task
from isobit.training.rollouts.taught import SupervisedSample, Teacher
from tests.training.test_taught import named, tokenizer_of

TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = TOOLS.replace("{% if tools %}", "{% if false %}").replace("m.tool_calls or []", "[]")
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": ADD}
ASKED = {"role": "user", "content": "What is 3 + 4?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "name": "add", "content": "7"}
SAID = {"role": "assistant", "content": "It is 7."}
WRITTEN = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call><|im_end|>'


def tokenizer(template: str = TOOLS) -> Tokenizer:
    return tokenizer_of(template, "<|im_end|>")


def teacher(tokenizer: Tokenizer, turns: str = "last") -> Teacher:
    config = SimpleNamespace(vocab_size=tokenizer.vocab_size)
    model: Any = SimpleNamespace(tokenizer=tokenizer, config=config)
    return Teacher(Task("file", Dataset([]), Dataset([])), model, turns)


def samples(
    row: dict[str, Any], turns: str = "last", template: str = TOOLS, loss: str = "sft"
) -> list[SupervisedSample]:
    (example,) = read_examples(Source(Path("rows"), rows=[row]), Shaping(supervised=True))
    return teacher(tokenizer(template), turns).lesson(example, loss)


def prompt(sample: SupervisedSample) -> str:
    return "".join(named(tokenizer(), sample.prompt_ids))


def learned(sample: SupervisedSample) -> str:
    mask = sample.completion_mask or (True,) * len(sample.completion_ids)
    return "".join(named(tokenizer(), [t for t, own in zip(sample.completion_ids, mask) if own]))


def whole(sample: SupervisedSample) -> str:
    return "".join(named(tokenizer(), (*sample.prompt_ids, *sample.completion_ids)))


FORMS: list[Any] = [
    [TOOL],
    json.dumps([TOOL]),
    [json.dumps(TOOL)],
    [ADD],  # xLAM: bare functions
    json.dumps([ADD]),
    [{"type": "function", "function": {**ADD, "strict": None}}],  # Parquet's nulls
    [{"type": "function", "function": {**ADD, "parameters": json.dumps(ADD["parameters"])}}],
]


@pytest.mark.parametrize("form", FORMS)
def test_the_template_is_given_the_tools_of_a_row(form: Any) -> None:
    row = {"messages": [ASKED, CALLS, TOLD, SAID], "tools": form}
    (sample,) = samples(row)
    assert prompt(sample).startswith(f"<|im_start|>system\n{json.dumps([TOOL])}<|im_end|>")
    for none in ([], "", None, "[]"):  # the control: a row without any
        (sample,) = samples({**row, "tools": none})
        assert prompt(sample).startswith("<|im_start|>user")


def test_pairs_and_labelled_answers_have_the_tools_too() -> None:
    pair = {"prompt": [ASKED], "chosen": [CALLS], "rejected": [SAID], "tools": [TOOL]}
    for sample in samples(pair, loss="dpo"):
        assert '"name": "add"' in prompt(sample)
    (sample,) = samples(
        {"prompt": [ASKED], "completion": [CALLS], "label": True, "tools": [TOOL]}, loss="kto"
    )
    assert '"name": "add"' in prompt(sample)
    assert learned(sample) == WRITTEN


@pytest.mark.parametrize("tools", ["add", 7, {"name": "add"}, ["add"], [7], [{"parameters": {}}]])
def test_what_is_no_list_of_tools_is_refused(tools: Any) -> None:
    with pytest.raises(IsobitError, match="row 1: column 'tools': expected"):
        samples({"messages": [ASKED, SAID], "tools": tools})


def test_tools_and_calls_that_are_not_written_are_refused() -> None:
    row = {"messages": [ASKED, CALLS, TOLD, SAID]}
    with pytest.raises(IsobitError, match="row 1: column 'tools': the model's chat template wri"):
        samples({**row, "tools": [TOOL]}, template=PLAIN)
    with pytest.raises(IsobitError, match="row 1: the model's chat template leaves out call 0"):
        samples(row, template=PLAIN)
    with pytest.raises(IsobitError, match="tools is for the chat template, and the prompt is text"):
        samples({"prompt": "3 + 4", "completion": "7", "tools": [TOOL]})
    with pytest.raises(IsobitError, match="the answer calls a tool"):
        samples({"prompt": "3 + 4", "completion": [CALLS]})
    assert samples({"messages": [ASKED, SAID]}, template=PLAIN)  # the control


def test_an_answer_that_calls_is_learned() -> None:
    for row in (
        {"messages": [ASKED, CALLS]},
        {"messages": [ASKED, {**CALLS, "content": None}]},
        {"prompt": [ASKED], "completion": [CALLS]},
        {
            "conversations": [
                {"from": "human", "value": "What is 3 + 4?"},
                {"from": "function_call", "value": json.dumps(CALL["function"])},
            ]
        },
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
            ]
        },
    ):
        (sample,) = samples(row)
        assert learned(sample) == WRITTEN


def test_a_completion_of_several_messages_is_learned_without_what_tools_say() -> None:
    row = {"prompt": [ASKED], "completion": [CALLS, TOLD, SAID]}
    for turns in ("last", "all"):
        (sample,) = samples(row, turns)
        assert learned(sample) == WRITTEN + "It is 7.<|im_end|>"
        assert "<|im_start|>tool\n7<|im_end|>" in whole(sample)
    chosen, rejected = samples(
        {"prompt": [ASKED], "chosen": row["completion"], "rejected": [SAID]}, loss="dpo"
    )
    assert (learned(chosen), learned(rejected)) == (
        WRITTEN + "It is 7.<|im_end|>",
        "It is 7.<|im_end|>",
    )
    with pytest.raises(IsobitError, match="got a message of role 'tool'"):
        samples({"prompt": [ASKED], "completion": [CALLS, TOLD]})


def test_words_of_sharegpt_for_calls_and_results() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "What is 3 + 4?"},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "7"},
            {"from": "gpt", "value": "It is 7."},
        ],
        "tools": json.dumps([ADD]),
    }
    (sample,) = samples(row, "all")
    (theirs,) = samples({"messages": [ASKED, CALLS, TOLD, SAID], "tools": [TOOL]}, "all")
    assert sample == theirs
    row["conversations"][1]["value"] = "I add."
    with pytest.raises(IsobitError, match="a call of a tool: expected an object with a name"):
        samples(row)


GOES_ON = (  # DiffusionGemma's: a tool's result is in the turn, and the answer behind it sampled there
    TOOLS.replace(
        "{% if add_generation_prompt %}",
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}",
    )
)


def test_a_header_behind_a_tool_is_context() -> None:
    """The control is a template that writes it before what is sampled too."""
    row = {"messages": [ASKED, CALLS, TOLD, SAID]}
    for template in (GOES_ON, TOOLS):
        (sample,) = samples(row, template=template)
        assert learned(sample) == "It is 7.<|im_end|>"
        assert whole(sample).endswith("<|im_start|>assistant\nIt is 7.<|im_end|>")
        (every,) = samples(row, "all", template=template)
        assert learned(every) == WRITTEN + "It is 7.<|im_end|>"


def test_two_messages_in_a_row_are_two_turns() -> None:
    """And what the template writes between them is not learned."""
    chat = [ASKED, {"role": "assistant", "content": "So."}, SAID]
    between = "So.<|im_end|>\n<|im_start|>assistant\nIt is 7.<|im_end|>"
    (last,) = samples({"messages": chat})
    assert learned(last) == "It is 7.<|im_end|>"
    (every,) = samples({"messages": chat}, "all")
    assert learned(every) == "So.<|im_end|>It is 7.<|im_end|>"
    assert whole(every) == whole(last)
    assert whole(last).endswith(between)
    (sample,) = samples({"prompt": [ASKED], "completion": chat[1:]})
    assert learned(sample) == learned(every)
    (begun,) = samples({"prompt": chat[:2], "completion": [SAID]})  # as TRL's pairs
    assert whole(begun).endswith(between)
    (text,) = samples(
        {"prompt": chat[:2], "completion": " It is 7."}
    )  # the control: a text goes on
    assert whole(text).endswith("assistant\nSo. It is 7.<|im_end|>")


LAST_THINKS = (  # Qwen3's: the last answer alone has the block of thoughts
    TOOLS.replace(
        "<|im_start|>{{ m.role }}\n",
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}",
    )
)


def test_an_answer_behind_another_is_learned_as_the_conversation_has_both() -> None:
    """The control is the same difference behind a user's message, which is refused."""
    assert LAST_THINKS != TOOLS
    chat = [ASKED, {"role": "assistant", "content": "So."}, SAID]
    (last,) = samples({"messages": chat}, template=LAST_THINKS)
    assert learned(last) == "<think></think>It is 7.<|im_end|>"
    between = "assistant\nSo.<|im_end|>\n<|im_start|>assistant\n<think></think>It is 7.<|im_end|>"
    assert whole(last).endswith(between)
    other = LAST_THINKS.replace("m.role == 'assistant' and", "m.role == 'user' and")
    with pytest.raises(IsobitError, match="what is learned would not follow what is sampled"):
        samples({"messages": [ASKED, SAID]}, template=other)


@pytest.mark.parametrize("key", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}])
def test_a_message_that_says_so_is_not_learned(key: dict[str, Any]) -> None:
    bad, good = {"role": "assistant", "content": "BAD", **key}, {**SAID, "weight": 1}
    (sample,) = samples({"messages": [ASKED, bad, ASKED, good]}, "all")
    assert learned(sample) == "It is 7.<|im_end|>"
    assert "BAD" in whole(sample)
    (sample,) = samples({"messages": [ASKED, good, ASKED, bad]}, "all")
    assert learned(sample) == "It is 7.<|im_end|>"
    for turns in ("last", "all"):
        with pytest.raises(IsobitError, match="row 1: the answer's weight is 0"):
            samples({"messages": [ASKED, bad]}, turns)
    (control,) = samples({"messages": [ASKED, SAID, ASKED, good]}, "all")
    assert learned(control) == "It is 7.<|im_end|>" * 2


def test_a_weight_between_is_refused() -> None:
    with pytest.raises(IsobitError, match=r"messages\[1\]: weight: expected 0 or 1"):
        samples({"messages": [ASKED, {**SAID, "weight": 0.5}]})


@pytest.mark.parametrize("spelled", ["7<|im_end|>", "7<|im_end|>\n", "7 <|im_end|><|im_end|>"])
def test_an_answer_that_spells_its_end_ends_once(
    spelled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"role": "assistant", "content": spelled}
    rows: list[dict[str, Any]] = [
        {"prompt": "3 + 4 =", "completion": spelled},
        {"messages": [ASKED, answer]},
        {"prompt": [ASKED], "completion": [answer]},
        {"text": f"3 + 4 = {spelled}"},
    ]
    for row in rows:
        (example,) = read_examples(Source(Path("rows"), rows=[row]), Shaping(supervised=True))
        given = teacher(tokenizer())
        (sample,) = given.samples(example)
        assert learned(sample).rstrip().endswith("7<|im_end|>") or "7 <|im_end|>" in learned(sample)
        assert learned(sample).count("<|im_end|>") == 1
        assert named(tokenizer(), sample.completion_ids)[-1] == "<|im_end|>"
        given.say([(example, sample)])
        assert "1 answers spell <eos> or <|im_end|> at their end: taken" in (
            capsys.readouterr().err
        )
    given = teacher(tokenizer())  # the control: one that does not, and nothing is said
    (example,) = read_examples(
        Source(Path("rows"), rows=[{"prompt": "3 + 4 =", "completion": "7"}]),
        Shaping(supervised=True),
    )
    given.say([(example, given.sample(example))])
    assert capsys.readouterr().err == ""
    (inside,) = read_examples(
        Source(Path("rows"), rows=[{"prompt": "3 + 4 =", "completion": "7<|im_end|>8"}]),
        Shaping(supervised=True),
    )
    given.say([(inside, given.sample(inside))])
    assert "the answers' own text spells 1 special tokens, such as <|im_end|>: encoded as text" in (
        capsys.readouterr().err
    )


def test_nulls_of_parquet_are_no_arguments() -> None:
    """A file has a key for every argument of every call in it, null where a call has none."""
    call = {"id": None, "function": {"name": "add", "arguments": {"a": 3, "text": None}}}
    (sample,) = samples({"messages": [ASKED, {**CALLS, "tool_calls": [call]}]})
    assert learned(sample) == WRITTEN
    (sample,) = samples({"messages": [{**ASKED, "tool_calls": None}, {**SAID, "tool_calls": []}]})
    assert learned(sample) == "It is 7.<|im_end|>"
