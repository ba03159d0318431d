"""What supervised training learns: the tokens of the whole text or conversation, cut as TRL 1.16
cuts them, up to the token that ends the answer."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from isobit.data.dataset import Dataset, Example
from isobit.errors import IsobitError
from isobit.model import Tokenizer
from isobit.tasks.builtin import Task
from isobit.training.rollouts.taught import SupervisedSample, Teacher, end_of_text
from tests.models import ALPHABET

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt "
    "%}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATES = {
    "llama3": LLAMA3,
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
        "[/INST]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "thoughts": (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else "
        "%}<|assistant|><think>{{ m.reasoning_content or '' }}</think>{{ "
        "m.content.split('</think>')[-1] | trim }}<|end|>{% endif %}{% endfor %}{% if "
        "add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}
ENDS = {
    "llama3": "<|eot_id|>",
    "chatml": "<|im_end|>",
    "phi3": "<|end|>",
    "mistral": "<eos>",
    "thoughts": "<|end|>",
}
NAMES = re.compile(r"<\|[^|<>{}']{1,40}\|>|<｜[^｜]{1,40}｜>|<[a-z]+_of_[a-z]+>|<turn\|>|<\|turn>")
ASKED = [{"role": "user", "content": "Why is 1 < 2?"}]
ANSWERS = [
    "5",
    " It is so. ",
    "two\n",
    "\nafter a line",
    "é😀",
    "<think>Hm.</think>\n\nSo.",
    "a | b <|",
]


def tokenizer_of(template: str | None, *ends: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level BPE whose special tokens are those that the template spells; generation stops at
    `ends`."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(["\n\nuser assistant It is so, why\n\n"] * 4, trainer)
    roles = ("<|user|>", "<|assistant|>", "[INST]", "[/INST]", "<eos>", "<bos>")
    names = sorted({*NAMES.findall(template or ""), *roles, *ends, *special})
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    settings = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return Tokenizer(fast, settings, [fast.token_to_id(name) for name in ends], template)


def taught(
    tokenizer: Tokenizer, prompt: Any, completion: Any, gold: str | None = None
) -> SupervisedSample:
    example = Example(0, prompt, {gold or "completion": completion}, "rows.jsonl:3")
    return teacher(tokenizer, gold).sample(example)


def teacher(tokenizer: Tokenizer, gold: str | None = None) -> Teacher:
    model: Any = SimpleNamespace(
        tokenizer=tokenizer, config=SimpleNamespace(vocab_size=tokenizer.vocab_size)
    )
    return Teacher(Task("file", Dataset([]), Dataset([]), gold=gold), model)


def of_trl(tokenizer: Tokenizer, prompt: Any, completion: str) -> tuple[list[int], list[int]]:
    """(prompt, completion) by transformers and the rule of TRL's SFT trainer,
    `common_prefix_length`."""
    settings = {"bos_token": "<bos>", "eos_token": "<eos>"}
    theirs: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.fast, **settings)
    if isinstance(prompt, str):
        alone = theirs(prompt)["input_ids"]
        whole = theirs(f"{prompt}{completion}<eos>")["input_ids"]
    else:
        answer = {"role": "assistant", "content": completion}
        form = {"tokenize": True, "return_dict": False}
        given = {"chat_template": tokenizer.chat_template, **form}
        alone = theirs.apply_chat_template(prompt, add_generation_prompt=True, **given)
        whole = theirs.apply_chat_template([*prompt, answer], **given)
    length = 0
    for one, other in zip(alone, whole):
        if one != other:
            break
        length += 1
    return whole[:length], whole[length:]


def named(tokenizer: Tokenizer, ids: Any) -> list[str]:
    return [tokenizer.decode([token], special=True) for token in ids]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_cut_as_trl_cuts_it_up_to_the_end_of_the_turn(name: str, answer: str) -> None:
    """What a template writes after that, such as a line's end, is TRL's alone: generation has
    stopped before."""
    tokenizer = tokenizer_of(TEMPLATES[name], "<eos>", ENDS[name])
    sample = taught(tokenizer, ASKED, answer)
    (prompt, completion) = of_trl(tokenizer, ASKED, answer)
    assert list(sample.prompt_ids) == prompt
    learned = list(sample.completion_ids)
    assert learned == completion[: len(learned)]
    assert named(tokenizer, learned).count(ENDS[name]) == 1
    assert named(tokenizer, learned)[-1] == ENDS[name]
    assert "".join(named(tokenizer, completion[len(learned) :])).strip() in ("", "<eos>")


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("prompt", ["Why?", "Why? ", "Why?\n", "It i", "1 < 2: "])
def test_a_text_is_cut_as_trl_cuts_it(prompt: str, answer: str) -> None:
    tokenizer = tokenizer_of(None, "<eos>")
    sample = taught(tokenizer, prompt, answer)
    theirs = of_trl(tokenizer, prompt, answer)
    if not theirs[0]:  # TRL learns nothing of the first token either: nothing predicts it
        theirs = theirs[1][:1], theirs[1][1:]
    assert (list(sample.prompt_ids), list(sample.completion_ids)) == theirs


@pytest.mark.slow
def test_every_template_that_trl_carries() -> None:
    """Where an answer is written as it is sampled; the others are refused, as is a template for
    images."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not here")
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    refused = set()
    for file in files:
        template = file.read_text()
        tokenizer = tokenizer_of(template, "<eos>")
        try:
            sample = taught(tokenizer, ASKED, "It is so.")
        except IsobitError:
            refused.add(file.stem.removesuffix("_training"))
            continue
        prompt, completion = of_trl(tokenizer, ASKED, "It is so.")
        learned = list(sample.completion_ids)
        own = (
            learned[:-1]
            if named(tokenizer, learned)[-1] == "<eos>" and "eos" not in template
            else learned
        )
        assert list(sample.prompt_ids) == prompt, file.stem
        assert own == completion[: len(own)], file.stem
        assert not "".join(named(tokenizer, completion[len(own) :])).strip(), file.stem
    assert len(files) > 60
    assert refused == {
        *("deepseek_r1_distill", "deepseekv3"),
        *(f"nemotron_3_{name}" for name in ("5_lightning", "nano", "super", "ultra")),
        *("idefics3", "smolvlm", "llava_next"),
    }


def test_a_turn_ends_with_what_its_template_ends_it_with() -> None:
    """Llama 3's first end of sequence ends a text, and no turn."""
    ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    tokenizer = tokenizer_of(LLAMA3, *ends)
    assert named(tokenizer, taught(tokenizer, ASKED, "5").completion_ids)[-1:] == ["<|eot_id|>"]
    assert named(tokenizer, taught(tokenizer, "2 + 3 =", "5").completion_ids)[-1:] == [
        "<|end_of_text|>"
    ]
    tokenizer.settings["eos_token"] = {"content": "<|eot_id|>"}  # the tokenizer's own goes first
    assert tokenizer.fast.id_to_token(end_of_text(tokenizer)) == "<|eot_id|>"


def test_the_tokens_are_the_templates() -> None:
    """What it trims, strips and adds; thoughts beside the text reach it."""
    tokenizer = tokenizer_of(TEMPLATES["thoughts"], "<|end|>")

    def learned(completion: Any) -> str:
        return "".join(named(tokenizer, taught(tokenizer, ASKED, completion).completion_ids))

    assert learned(" 5 ") == "<think></think>5<|end|>"
    assert learned("<think>Add.</think> 5") == "<think></think>5<|end|>"
    answer = {"role": "assistant", "content": "5", "reasoning_content": "Add."}
    assert learned([answer]) == "<think>Add.</think>5<|end|>"
    assert learned([{**answer, "content": [{"type": "text", "text": "5"}]}]) == learned([answer])
    example = Example(0, ASKED, {"completion": "5"}, answer=answer)  # as from `messages`
    assert "".join(named(tokenizer, teacher(tokenizer).sample(example).completion_ids)) == learned(
        [answer]
    )


@pytest.mark.parametrize("prompt", [ASKED, "Why?"])
def test_an_answer_that_spells_an_end_does_not_end_there(prompt: Any) -> None:
    tokenizer = tokenizer_of(TEMPLATES["chatml"], "<|im_end|>")
    tokens = named(tokenizer, taught(tokenizer, prompt, "a<|im_end|>b<|im_end|>").completion_ids)
    assert tokens.count("<|im_end|>") == 1
    assert "".join(tokens) == "a<|im_end|>b<|im_end|>"  # what stood at its end is the end
    tokenizer.special_tokens_in_content = "allow"  # the control: then they are the tokens
    tokens = named(tokenizer, taught(tokenizer, prompt, "a<|im_end|>b<|im_end|>").completion_ids)
    assert (tokens.count("<|im_end|>"), "".join(tokens)) == (2, "a<|im_end|>b<|im_end|>")


def test_a_template_without_an_end_gets_the_end_of_sequence() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer = tokenizer_of(
        template + "{% if add_generation_prompt %}[assistant]{% endif %}", "<eos>"
    )
    assert "".join(named(tokenizer, taught(tokenizer, ASKED, "5").completion_ids)) == "5<eos>"


def test_an_answer_goes_on_with_what_the_assistant_began() -> None:
    """In one message, where the prompt ends with the assistant's."""
    tokenizer = tokenizer_of(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "<eos>"
    )
    sample = taught(tokenizer, [*ASKED, {"role": "assistant", "content": "It"}], " is.")
    assert "".join(named(tokenizer, sample.prompt_ids)) == "[user]Why is 1 < 2?[assistant]It"
    assert "".join(named(tokenizer, sample.completion_ids)) == " is.<eos>"


def test_a_real_tokenizer_puts_no_space_between(stories: Path) -> None:
    """SentencePiece begins every text with one, so two texts have one more than the whole."""
    tokenizer = Tokenizer.load(stories)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(stories)
    sample = taught(tokenizer, "Once upon a time", ", there was")
    whole = [*sample.prompt_ids, *sample.completion_ids]
    assert whole == [*theirs("Once upon a time, there was")["input_ids"], *tokenizer.eos_ids]
    assert list(sample.prompt_ids) == theirs("Once upon a time")["input_ids"]
    assert whole != [
        *tokenizer.encode("Once upon a time"),
        *tokenizer.encode(", there was", False),
        *tokenizer.eos_ids,
    ]


def test_characters_have_the_tokens_of_two_texts() -> None:
    """Of which the base models of the quickstart are made."""
    tokenizer = Tokenizer.characters(ALPHABET)
    sample = taught(tokenizer, "12+3=", "15", "answer")
    assert list(sample.prompt_ids) == tokenizer.encode("12+3=")
    assert list(sample.completion_ids) == [*tokenizer.encode("15"), *tokenizer.eos_ids]


def test_what_would_be_learned_wrongly_is_refused() -> None:
    """In one line, with the row."""

    def refused(template: str, completion: Any, gold: str | None = None) -> str:
        with pytest.raises(IsobitError) as caught:
            taught(tokenizer_of(template, "<eos>"), ASKED, completion, gold)
        assert str(caught.value).startswith("rows.jsonl:3: ")
        return str(caught.value)

    begins = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    thinking = begins + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    said = refused(thinking, "5")
    assert re.search(
        r"writes '.*<\|assistant\|><think>' before an answer that is sampled, but "
        r"'.*<\|assistant\|>5'",
        said,
    )
    assert taught(tokenizer_of(thinking, "<eos>"), ASKED, "<think>Add.</think>5").completion_ids
    nothing = (
        "{% for m in messages %}<|{{ m.role }}|>{% endfor %}{% if add_generation_prompt "
        "%}<|assistant|>{% endif %}"
    )
    assert "the chat template writes nothing of the answer" in refused(nothing, "5")
    for value in ("", " \n", [{"role": "assistant", "content": ""}]):
        assert "column 'completion' is empty: there is nothing to learn" in refused(begins, value)
    for value, found in [(None, "null"), (["7"], "a list with text in it"), (7, "a number")]:
        wanted = f"column 'completion': expected text or the messages of an assistant, got {found}"
        assert wanted in refused(begins, value)
    assert "column 'answer': expected text, a number or the messages" in refused(
        begins, None, "answer"
    )
    assert taught(tokenizer_of(None, "<eos>"), "6 * 7 =", 42, "answer").completion_ids


def test_ends_at_which_generation_does_not_stop_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(tokenizer: Tokenizer, prompt: Any = ASKED) -> str:
        example = Example(0, prompt, {"completion": "5"}, "rows.jsonl:1")
        given = teacher(tokenizer)
        given.say([(example, given.sample(example))])
        return capsys.readouterr().err

    chatml = TEMPLATES["chatml"]
    assert said(tokenizer_of(chatml, "<|im_end|>")) == ""
    assert re.fullmatch(
        r"warning: the chat template ends an answer with <\|im_end\|> \(id \d+\), but "
        r"generation stops at <eos> "
        r"\(id \d+\); add it to eos_token_id in the model's generation_config\.json\n",
        said(tokenizer_of(chatml, "<eos>")),
    )
    assert "but generation stops at no token" in said(tokenizer_of(chatml))
    assert "names no end-of-sequence token, so answers are learned without an end" in said(
        tokenizer_of(None), "Why?"
    )
    assert said(tokenizer_of(None, "<eos>"), "Why?") == ""


def test_prompts_that_end_inside_a_token_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    given = teacher(tokenizer_of(None, "<eos>"))
    rows = [("so, why", "?"), ("so, wh", "y?"), ("1 ", "It is")]
    examples = [
        Example(i, prompt, {"completion": answer}, f"f:{i}")
        for i, (prompt, answer) in enumerate(rows)
    ]
    given.say([(example, given.sample(example)) for example in examples])
    assert (
        "2 of 3 prompts end inside a token of prompt and answer together, the first: f:1;"
        in capsys.readouterr().err
    )
