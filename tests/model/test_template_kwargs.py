"""Variables of a chat template: of a config or a command for all conversations, of a row for its
own; a template writes with them what transformers writes with the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from isobit.config import load_config
from isobit.data.dataset import Shaping, read_examples
from isobit.data.readers import Source
from isobit.engine.prompts import encode_prompt
from isobit.errors import IsobitError
from isobit.model import TextRules, Tokenizer
from isobit.model.text.appending import Appending
from isobit.training.parts.model import text_rules
from tests.loaders.cases import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{{ effort | default('') }}{% endif %}"
)
ASKED = [{"role": "user", "content": "why?"}]


def rows(folder: Path, *given: Any) -> Path:
    path = folder / "rows.jsonl"
    lines = [json.dumps({"prompt": "why?", "chat_template_kwargs": each}) for each in given]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def examples(path: Path, chat: bool = True) -> list[Any]:
    return list(read_examples(Source(path), Shaping(chat=chat)))


def test_the_row_s_own_go_before_the_config_s(tmp_path: Path) -> None:
    """As text and as tokens, and as transformers renders them. The first row has none of its own."""
    byte_tokenizer(tmp_path, TEMPLATE)
    rules = TextRules(chat_template_kwargs={"enable_thinking": False, "effort": "low"})
    tokenizer = Tokenizer.load(tmp_path, rules)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.fast)
    own = [None, {"enable_thinking": True}, {"effort": "high", "enable_thinking": None}]
    wanted: list[dict[str, Any]] = [
        {"enable_thinking": False, "effort": "low"},
        {"enable_thinking": True, "effort": "low"},
        {"enable_thinking": False, "effort": "high"},
    ]
    for example, variables in zip(examples(rows(tmp_path, *own)), wanted, strict=True):
        text = theirs.apply_chat_template(
            ASKED, tokenize=False, add_generation_prompt=True, chat_template=TEMPLATE, **variables
        )
        assert tokenizer.render_chat(example.prompt) == text
        size = tokenizer.vocab_size
        assert encode_prompt("it", example.prompt, tokenizer, size) == tokenizer.encode(text)
        appended = Appending(tokenizer, {}, example.prompt).appended(ASKED, [5])
        assert tokenizer.decode(appended, special=True).endswith(text[text.rindex("assistant") :])
    plain = Tokenizer.load(tmp_path)
    assert isinstance(text, str)
    assert plain.render_chat(ASKED) == text.replace("<think>\n\n</think>\n\n", "").replace(
        "high", ""
    )


def test_a_message_has_no_more_in_it_for_the_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, "{{ messages[0].keys() | list | tojson }}")
    (example,) = examples(rows(tmp_path, {"effort": "low"}))
    assert tokenizer.render_chat(example.prompt) == '["role", "content"]'


def test_a_config_s_variables_reach_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {path: m, chat_template_kwargs: {enable_thinking: false}}\n"
        "task: {path: rows.jsonl, chat: true}\nsteps: 1\n"
    )
    config = load_config(tmp_path / "run.yaml", ["model.chat_template_kwargs.effort=low"])
    assert text_rules(config).chat_template_kwargs == {"enable_thinking": False, "effort": "low"}
    changed = replace(config, model=replace(config.model, chat_template_kwargs={}))
    assert text_rules(changed).chat_template_kwargs == {}


@pytest.mark.parametrize(
    ("given", "chat", "message"),
    [
        ({"tools": []}, True, "rows.jsonl.*chat_template_kwargs: 'tools' is not yours to set"),
        ("low", True, "chat_template_kwargs must be a mapping, got text"),
        ({"effort": "low"}, False, "the prompt is text; set task.chat: true"),
    ],
)
def test_what_cannot_be_a_row_s_variables(
    tmp_path: Path, given: Any, chat: bool, message: str
) -> None:
    with pytest.raises(IsobitError, match=message):
        examples(rows(tmp_path, given), chat)


def test_a_config_cannot_set_what_every_template_is_given(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {path: m, chat_template_kwargs: {messages: []}}\ntask: {path: r.jsonl}\nsteps: 1\n"
    )
    with pytest.raises(IsobitError, match="'messages' is not yours to set"):
        load_config(tmp_path / "run.yaml")
