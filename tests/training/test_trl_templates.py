"""What supervised rows learn with the templates that TRL trains with, next to the mask that TRL
learns (`assistant_only_loss`, by the `{% generation %}` of its templates): the same tokens, or a
refusal that says why. Templates are read from the installed package.

One rule tells the two apart: isobit learns what a model samples, behind what the template writes
before an answer, up to the token that ends it. TRL's marks also take in, of some templates, what
stands before that and behind it (`AROUND`).
"""

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from isobit.data.dataset import Shaping, read_examples
from isobit.data.readers import Source
from isobit.errors import IsobitError
from isobit.model import Tokenizer
from tests.model.test_appending import ends_of, templates_of_trl, theirs_of
from tests.models import slow_where
from tests.training.test_taught import NAMES
from tests.training.test_taught_tools import ASKED, SAID, TOLD, TOOL, teacher

Ids = list[int]


def call(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": number}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


THINKS = {"reasoning_content": "Three and four."}
SYSTEM = {"role": "system", "content": "Be short."}
MORE, EIGHT = {"role": "user", "content": "4 + 4?"}, {"role": "assistant", "content": "8, I say."}
CALLS = {"role": "assistant", "content": "", "tool_calls": [call(0)]}
BOTH = {**CALLS, "tool_calls": [call(0), call(1)]}
TOLD_0, TOLD_1 = ({**TOLD, "tool_call_id": f"call0000{number}"} for number in range(2))
_TOOL = {**TOOL, "function": {"description": "Adds.", **TOOL["function"]}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "one turn": [ASKED, SAID],
    "two turns": [ASKED, SAID, MORE, EIGHT],
    "system": [SYSTEM, ASKED, SAID, MORE, EIGHT],
    "thoughts": [ASKED, THINKS | SAID],
    "thoughts in turns": [ASKED, THINKS | SAID, MORE, THINKS | EIGHT],
    "tools": [ASKED, SAID],
    "tools in turns": [SYSTEM, ASKED, SAID, MORE, EIGHT],
    "a call": [ASKED, CALLS, TOLD_0, SAID],
    "ends with a call": [ASKED, CALLS],
    "text and a call": [ASKED, {**CALLS, "content": "I add."}, TOLD_0, SAID],
    "two calls": [ASKED, BOTH, TOLD_0, TOLD_1, SAID],
    "calls in turns": [ASKED, CALLS, TOLD_0, SAID, MORE, CALLS, TOLD_0, EIGHT],
    "thoughts and a call": [ASKED, THINKS | CALLS, TOLD_0, THINKS | SAID],
}
"""Conversations; those from `tools` on have the column."""
_ALL = ("glm4moe", "lfm2_v2", "muse_glimmer", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_6")
_ALL += ("qwen3_8", "qwen3_instruct_2507", "qwen3_vl")
_PLAIN = ("cohere", "cohere2", "gemma3", "llama3", "phi3", "phi3_5", "qwen2_5_vl")
_NEMOTRON = tuple(f"nemotron_3_{name}" for name in ("nano", "super", "ultra", "5_lightning"))
_NONE = ("deepseekv3", "deepseek_r1_distill", "idefics3", "llava_next", "smolvlm")
EQUAL = {
    **dict.fromkeys(_ALL, len(ROWS)),
    **dict.fromkeys(_PLAIN, 5),  # those without tools
    **dict.fromkeys(_NEMOTRON, 3),  # those with thoughts: sampling begins them
    **dict.fromkeys(_NONE, 0),  # thoughts begun as well, or texts as lists of parts
    "diffusion_gemma": 12,
    "gemma": 4,
    "gptoss": 10,
    "lfm2": 7,
    "qwen3_5_nothink": 10,
}
"""Of how many rows each template's mask is what is learned; the others are refused."""
QUICK = ("glm4moe", "gptoss", "lfm2_v2", "phi3", "qwen2_5", "qwen3_5_nothink")
REFUSED = re.compile(
    r"column 'tools': the model's chat template writes none"
    r"|the model's chat template (refused a conversation|leaves out (call|what a message of role))"
    r"|the chat template writes .* before an answer that is sampled, but"
    r"|the chat template writes nothing of the answer",
    re.DOTALL,
)
AROUND = {
    # a line break behind the end, which is never sampled
    ("", "\n"): ("diffusion_gemma", "gemma", "gemma3", "lfm2", "lfm2_v2", "phi3", "phi3_5")
    + ("qwen2_5_vl", "qwen3", "qwen3_instruct_2507", "qwen3_vl", *_NEMOTRON),
    # and what Phi-3's template writes behind the last message
    ("", "\n<|end|>"): ("phi3", "phi3_5"),
    # the header, or a part of it, and thoughts that the template begins before an answer
    ("<|start|>assistant", ""): ("gptoss", "muse_glimmer"),
    ("\n", "\n"): ("qwen2_5",),
    ("<think>\n", "\n"): (*_NEMOTRON, "qwen3_5_think", "qwen3_6", "qwen3_8"),
    ("<think>\n\n</think>\n\n", "\n"): ("qwen3_5_nothink",),
    ("", ""): ("cohere", "cohere2", "diffusion_gemma", "glm4moe", "llama3"),
}
"""What TRL learns before and behind what is sampled, and of which templates; the last row: no more."""
TEMPLATE_S_OWN = {
    "diffusion_gemma": re.compile(r"<\|tool_response>\Z"),
}
"""What isobit learns and TRL does not: the token at which a model that calls a tool stops."""


def tokenizer_of_bytes(file: Path) -> Tokenizer:
    """A token for each byte, so that no token spans what is learned and what is not, and one for
    each of the names that the template spells."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    text, ends = file.read_text(), ends_of(file)
    names = dict.fromkeys(("<bos>", "<eos>", *ends, *NAMES.findall(text)))
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    settings = {"bos_token": "<bos>", "eos_token": ends[0]}
    return Tokenizer(fast, settings, [fast.token_to_id(name) for name in ends], text)


def runs(ids: Ids, mask: Any) -> list[Ids]:
    """Return the tokens that a mask takes, those next to each other together."""
    found: list[Ids] = [[]]
    for token, taken in zip(ids, mask, strict=True):
        if taken:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    return [run for run in found if run]


def tools_of(row: str) -> list[dict[str, Any]] | None:
    return [_TOOL] if "call" in row or "tools" in row else None


class Trl:
    """What TRL learns of conversations with one template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._theirs = tokenizer, theirs_of(tokenizer)
        self.around = set[tuple[str, str]]()

    def mask(self, messages: list[dict[str, Any]], tools: Any) -> tuple[Ids, Ids]:
        """Return the conversation's tokens, and which of them are learned."""
        form = {"tools": tools, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._theirs.apply_chat_template(messages, tokenize=True, **form)
        return found["input_ids"], found["assistant_masks"]

    def sampled(self, ids: Ids, mask: Ids, begun: Ids) -> list[Ids]:
        """Return the runs that TRL learns without what the template has `begun` before them and what
        follows the token that ends them."""
        found = []
        for run in runs(ids, mask):
            ends = [place for place, token in enumerate(run) if token in self._tokenizer.eos_ids]
            stop = ends[0] + 1 if ends else len(run)
            most = min(len(begun), stop)
            start = next(n for n in range(most, -1, -1) if begun[len(begun) - n :] == run[:n])
            parts = (
                self._tokenizer.decode(run[:start], special=True),
                self._tokenizer.decode(run[stop:], special=True),
            )
            self.around.add(parts)
            found.append(run[start:stop])
        return found

    def begun(self, messages: list[dict[str, Any]], tools: Any) -> Ids:
        """Return what the template writes before an answer."""
        place = max(n for n, message in enumerate(messages) if message["role"] != "assistant")
        before, asking = (
            self._theirs.apply_chat_template(
                messages[: place + 1], tools=tools, tokenize=False, add_generation_prompt=asked
            )
            for asked in (False, True)
        )
        pairs = enumerate(zip(before, asking))
        same = next((place for place, (a, b) in pairs if a != b), len(before))
        return self._tokenizer.encode(asking[same:])

    def learned(self, messages: list[dict[str, Any]], tools: Any) -> list[Ids]:
        """Return what of a conversation's mask is sampled."""
        return self.sampled(*self.mask(messages, tools), self.begun(messages, tools))


def lesson(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any
) -> list[tuple[Ids, Any]] | str:
    """Return (tokens, which are learned) of each sample of a row, or why it is refused."""
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    (example,) = read_examples(Source(Path("rows"), rows=[row]), Shaping(supervised=True))
    try:
        samples = teacher(tokenizer, "all").lesson(example, "sft")
    except IsobitError as refusal:
        return str(refusal)
    found = []
    for sample in samples:
        mask = sample.completion_mask or [True] * len(sample.completion_ids)
        ids = [*sample.prompt_ids, *sample.completion_ids]
        found.append((ids, [False] * len(sample.prompt_ids) + [*mask]))
    return found


def file_of(stem: str) -> Path:
    (file,) = (file for file in templates_of_trl() if file.stem == f"{stem}_training")
    return file


def test_every_training_template_is_here() -> None:
    stems = {file.stem for file in templates_of_trl()}
    assert EQUAL.keys() == {s.removesuffix("_training") for s in stems if s.endswith("_training")}


@pytest.mark.parametrize("stem", slow_where([*EQUAL], lambda stem: stem not in QUICK))
def test_what_is_learned_is_what_trl_learns(stem: str) -> None:
    """A conversation of which the template writes earlier messages otherwise later is a sample each,
    as TRL's mask has them where the conversation ends there. The control: a mask that is shifted by
    one token, another's tokens."""
    tokenizer, equal = tokenizer_of_bytes(file_of(stem)), 0
    trl, own = Trl(tokenizer), TEMPLATE_S_OWN.get(stem, re.compile(r"\Z"))
    for name, messages in ROWS.items():
        tools = tools_of(name)
        samples = lesson(tokenizer, messages, tools)
        if isinstance(samples, str):
            assert REFUSED.search(samples), (name, samples)
            continue
        learned = [run for ids, mask in samples for run in runs(ids, mask)]
        if len(samples) > 1:
            ends = [n + 1 for n, m in enumerate(messages) if m["role"] == "assistant"]
            wanted = [trl.learned(messages[:end], tools)[-1] for end in ends]
        else:
            ((ids, _),), (theirs, _) = samples, trl.mask(messages, tools)
            assert ids == theirs[: len(ids)], name
            wanted = trl.learned(messages, tools)
        found = [own.sub("", tokenizer.decode(run, special=True)) for run in learned]
        assert found == [tokenizer.decode(run, special=True) for run in wanted], name
        ids, mask = samples[-1]
        shifted = runs(ids, [*mask[1:], False])
        assert shifted[-1:] != wanted[-1:], name
        equal += 1
    assert equal == EQUAL[stem]
    known = {parts for parts, stems in AROUND.items() if stem in stems}
    assert trl.around == known


@pytest.mark.parametrize("stem", slow_where([*EQUAL], lambda stem: stem not in QUICK))
def test_the_published_template_teaches_the_same(stem: str) -> None:
    """Also GLM-4.5's, which writes no end behind an answer: the next message's beginning is it."""
    file = file_of(stem)
    texts = list[Any]()
    for path in (file, file.with_stem(stem)):
        tokenizer = tokenizer_of_bytes(path)
        found = [lesson(tokenizer, row, tools_of(name)) for name, row in ROWS.items()]
        texts.append(
            [
                None
                if isinstance(samples, str)
                else [tokenizer.decode(run, special=True) for one in samples for run in runs(*one)]
                for samples in found
            ]
        )
    assert texts[0] == texts[1]
    assert sum(text is not None for text in texts[0]) == EQUAL[stem]
