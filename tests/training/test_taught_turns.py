"""All turns of the assistant, by the template's own boundaries; and rows in others' columns."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isobit.data.dataset import Dataset, Example, Shaping, read_examples
from isobit.data.readers import Source
from isobit.errors import IsobitError
from isobit.model import Tokenizer
from isobit.tasks.builtin import Task
from isobit.training.rollouts.taught import SupervisedSample, Teacher
from tests.training.test_taught import ENDS, TEMPLATES, named, tokenizer_of

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It is so."},
    {"role": "user", "content": "1 < 2?"},
    {"role": "assistant", "content": "So it is."},
    {"role": "user", "content": "why"},
]
EXAMPLE = Example(0, CHAT, {"completion": "two"}, "rows.jsonl:3")


def samples(tokenizer: Tokenizer, example: Example, turns: str) -> list[SupervisedSample]:
    config = SimpleNamespace(vocab_size=tokenizer.vocab_size)
    model: Any = SimpleNamespace(tokenizer=tokenizer, config=config)
    return Teacher(Task("file", Dataset([]), Dataset([])), model, turns).samples(example)


def learned(tokenizer: Tokenizer, sample: SupervisedSample) -> str:
    mask = sample.completion_mask or (True,) * len(sample.completion_ids)
    ids = [token for token, trained in zip(sample.completion_ids, mask) if trained]
    return "".join(named(tokenizer, ids))


@pytest.mark.parametrize("name", ["phi3", "chatml"])
def test_every_turn_is_learned_with_its_end_in_one_row(name: str) -> None:
    """And nothing of the user's; the row is the whole conversation. The control: the last alone."""
    tokenizer, end = tokenizer_of(TEMPLATES[name], "<eos>", ENDS[name]), ENDS[name]
    (sample,) = samples(tokenizer, EXAMPLE, "all")
    assert learned(tokenizer, sample) == f"It is so.{end}So it is.{end}two{end}"
    (last,) = samples(tokenizer, EXAMPLE, "last")
    assert learned(tokenizer, last) == f"two{end}"
    whole = (*sample.prompt_ids, *sample.completion_ids)
    assert whole == (*last.prompt_ids, *last.completion_ids)


def test_each_turn_follows_what_it_would_be_sampled_from() -> None:
    """Its prompt in the row is the prompt that the engine is given for it, token by token."""
    tokenizer = tokenizer_of(TEMPLATES["chatml"], "<|im_end|>")
    (sample,) = samples(tokenizer, EXAMPLE, "all")
    whole = (*sample.prompt_ids, *sample.completion_ids)
    mask = [False] * len(sample.prompt_ids) + list(sample.completion_mask or ())
    starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    prompts = [tokenizer.encode_chat(CHAT[:n]) for n in (2, 4, 6)]
    assert [list(whole[:start]) for start in starts] == prompts


def test_a_template_that_writes_earlier_turns_otherwise_gives_rows_of_their_own() -> None:
    """As one that leaves out what was thought before the newest question."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}"
    )
    tokenizer = tokenizer_of(template, "<|end|>")
    found = samples(tokenizer, EXAMPLE, "all")
    assert [learned(tokenizer, each) for each in found] == [
        "It is so.<|end|>",
        "So it is.<|end|>",
        "two<|end|>",
    ]
    for each, count in zip(found, (2, 4, 6)):
        assert list(each.prompt_ids) == tokenizer.encode_chat(CHAT[:count])


def test_a_text_is_learned_but_for_its_first_token() -> None:
    tokenizer = tokenizer_of(None, "<eos>")
    (sample,) = samples(tokenizer, Example(0, "It is so", {"text": "It is so"}), "last")
    ids = tokenizer.encode("It is so")
    assert (list(sample.prompt_ids), list(sample.completion_ids)) == (
        ids[:1],
        [*ids[1:], *tokenizer.eos_ids],
    )


def read(*rows: dict[str, Any], supervised: bool = True, **shaping: Any) -> list[Example]:
    source = Source(Path("rows"), rows=rows)
    return read_examples(source, Shaping(supervised=supervised, **shaping))


def test_columns_of_others() -> None:
    (alpaca, more) = read(
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Say hello.", "input": "", "output": "Hello."},
    )
    assert (alpaca.prompt, alpaca.columns["completion"]) == ("Add.\n\n1 and 2", "3")
    assert (more.prompt, more.columns["completion"]) == ("Say hello.", "Hello.")
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    (shared,) = read({"conversations": turns})
    assert shared.prompt == [{"role": "user", "content": "Why?"}]
    assert shared.columns["completion"] == "So."
    (text,) = read({"text": "It is so."})
    assert (text.prompt, text.columns) == ("It is so.", {"text": "It is so."})
    asked, answers = {"role": "user", "content": "2+3="}, ("5", "6")
    both = [[asked, {"role": "assistant", "content": answer}] for answer in answers]
    (pair,) = read({"chosen": both[0], "rejected": both[1]})
    assert pair.prompt == [asked]
    assert [pair.columns[name][0]["content"] for name in ("chosen", "rejected")] == ["5", "6"]


def test_columns_that_are_not_what_they_are_called() -> None:
    """In one line with the place; and a run that samples knows none of them."""
    for row, said in (
        ({"instruction": 1, "output": "3"}, "'instruction' must be text"),
        ({"conversations": "Why?"}, "'conversations' must be a list of messages"),
        ({"chosen": "a", "rejected": "b"}, "no column 'prompt', and 'chosen'"),
        ({"chosen": [{"role": "user"}], "rejected": [{"role": "user"}]}, "end with different"),
    ):
        with pytest.raises(IsobitError, match=said):
            read(row)
    with pytest.raises(IsobitError, match="no column 'prompt'"):
        read({"text": "It is so."}, supervised=False)
