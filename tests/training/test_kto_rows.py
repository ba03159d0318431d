"""Rows of KTO in messages: the tokens, labels and mismatched pairs that TRL 1.16's own processing
makes of them, and the run that they are."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from isobit.config import load_sft_config
from isobit.data.dataset import Shaping, read_examples
from isobit.data.readers import Source
from isobit.errors import IsobitError
from isobit.model import Tokenizer
from isobit.rl.algorithm.given import mismatched
from isobit.tasks.builtin import TaskSettings
from isobit.tasks.builtin.arithmetic import load
from isobit.training.rollouts.given import given
from isobit.training.rollouts.taught import SupervisedSample
from isobit.training.train import train_supervised
from tests.rl.trl_loss import needs_trl
from tests.runs import fingerprint
from tests.training.test_kto_run import ROWS, labelled
from tests.training.test_taught import ENDS, TEMPLATES, named, teacher, tokenizer_of

SAID = [
    (["user: Why is 1 < 2?"], "It is so.", True),
    (["system: Be brief.", "user: Why?"], "é😀 <|", False),
    (["user: 1+1?", "assistant: 2", "user: Why?"], "two\nlines", True),
    (["user: so, why"], "5", False),
]
MESSAGES = [
    {
        "prompt": [
            {"role": role, "content": text}
            for role, _, text in (each.partition(": ") for each in prompt)
        ],
        "completion": [{"role": "assistant", "content": answer}],
        "label": label,
    }
    for prompt, answer, label in SAID
]
TEXTS = [
    {"prompt": f"{prompt[-1]}\n", "completion": answer, "label": label}
    for prompt, answer, label in SAID
]


class Rows(list[dict[str, Any]]):
    """What TRL asks of a dataset: rows, mapped one by one or all together, and filtered."""

    def map(
        self,
        function: Callable[..., dict[str, Any]],
        fn_kwargs: Any = None,
        batched: bool = False,
        batch_size: int = 0,
    ) -> "Rows":
        if not batched:
            return Rows({**row, **function(dict(row), **(fn_kwargs or {}))} for row in self)
        assert batch_size == len(self)
        columns = function({name: [row[name] for row in self] for name in self[0]})
        return Rows(dict(zip(columns, values)) for values in zip(*columns.values(), strict=True))

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> "Rows":
        return Rows(row for row in self if keep(row))


def of_trl(tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> Rows:
    """`_prepare_dataset` of TRL's KTOTrainer, with the same tokenizer and template."""
    from trl.trainer.kto_trainer import KTOTrainer

    settings = {"bos_token": "<bos>", "eos_token": "<eos>"}
    theirs: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.fast, **settings)
    theirs.chat_template = tokenizer.chat_template
    trainer = SimpleNamespace(calculate_KL=True, _tokenizer=theirs)
    args = SimpleNamespace(
        dataset_num_proc=None, max_length=500, per_device_train_batch_size=len(rows)
    )
    copies = Rows(json.loads(json.dumps(row)) for row in rows)
    found = KTOTrainer._prepare_dataset(trainer, copies, theirs, args, "train")
    assert len(found) == len(rows)
    return found


def ours(folder: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> list[SupervisedSample]:
    """As a run reads the same rows from a file."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = read_examples(Source(file), Shaping(supervised=True))
    return [teacher(tokenizer).labelled(example) for example in examples]


def cases() -> Iterator[Any]:
    for name in ("llama3", "chatml", "phi3", "mistral"):
        yield pytest.param(TEMPLATES[name], ENDS[name], MESSAGES, id=name)
    yield pytest.param(None, "<eos>", TEXTS, id="text")


@needs_trl
@pytest.mark.parametrize(("template", "end", "rows"), cases())
def test_rows_are_those_of_trls_own_processing(
    tmp_path: Path, template: str | None, end: str, rows: list[dict[str, Any]]
) -> None:
    """Prompts, answers up to the end of the turn, labels, and the answer that each prompt of a batch
    gets for the KL. The controls: another label, and the answers in another order."""
    tokenizer = tokenizer_of(template, "<eos>", end)
    found, theirs = ours(tmp_path, tokenizer, rows), of_trl(tokenizer, rows)
    assert [list(sample.prompt_ids) for sample in found] == [row["prompt_ids"] for row in theirs]
    assert [sample.reward > 0 for sample in found] == [row["label"] for row in theirs]

    def same(learned: tuple[int, ...], completion: list[int]) -> bool:
        """Behind the end of a turn a template may write a line's end, or one more end."""
        left = "".join(named(tokenizer, completion[len(learned) :])).strip()
        return list(learned) == completion[: len(learned)] and left in ("", "<eos>")

    for sample, row in zip(found, theirs, strict=True):
        assert same(sample.completion_ids, row["completion_ids"])
        assert named(tokenizer, sample.completion_ids)[-1] == end
    pairs = mismatched([given([sample], i)[0] for i, sample in enumerate(found)], 500)
    for pair, row in zip(pairs, theirs, strict=True):
        assert list(pair.prompt_ids) == row["prompt_ids"]
        assert same(pair.completion_ids, row["KL_completion_ids"])
        assert not same(pair.completion_ids, row["completion_ids"])
    turned = [{**row, "label": not row["label"]} for row in rows]
    assert [s.reward for s in ours(tmp_path, tokenizer, turned)] == [-s.reward for s in found]


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_messages_are_the_run_of_their_texts(tmp_path: Path, base_model: Path) -> None:
    """Where a template writes the contents alone, bit for bit. The control: one that also writes
    something else before an answer."""

    def run(name: str, template: str | None) -> Any:
        rows, folder, changes = ROWS, tmp_path / name, ["steps=2"]
        folder.mkdir()
        if template is not None:
            (folder / "chat.jinja").write_text(template)
            changes.append(f"model.chat_template={folder / 'chat.jinja'}")
            rows = [
                {
                    **row,
                    "prompt": [{"role": "user", "content": row["prompt"]}],
                    "completion": [{"role": "assistant", "content": row["completion"]}],
                }
                for row in ROWS
            ]
        config = load_sft_config(labelled(folder, base_model, rows), changes)
        found = fingerprint(train_supervised(config, quiet=True).run_dir)
        return found["model.safetensors"], found["metrics"]

    texts = run("texts", None)
    assert run("messages", PLAIN) == texts
    other = PLAIN.replace("{% endfor", "{% if m.role == 'user' %}={% endif %}{% endfor")
    assert run("other", other)[0] != texts[0]


def test_what_is_no_answer_is_refused_with_its_row(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(TEMPLATES["chatml"], "<eos>", "<|im_end|>")
    for completion, said in (
        ([{"role": "user", "content": "No."}], "a message of role 'user'"),
        ([], "an empty list"),
        (None, "null"),
    ):
        rows = [{**MESSAGES[0], "completion": completion}]
        with pytest.raises(IsobitError, match=rf"rows\.jsonl:1: column 'completion': .*{said}"):
            ours(tmp_path, tokenizer, rows)


def test_labelled_sums_are_right_where_the_label_says_so() -> None:
    """About half of them; the wrong ones differ in one digit."""
    task = load(TaskSettings(name="arithmetic", options={"digits": 2, "labels": True}))
    rows = [example.columns for example in task.train.examples[:400]]
    assert 150 < sum(row["label"] for row in rows) < 250
    assert all((row["completion"] == row["answer"]) is row["label"] for row in rows)
    for row in rows:
        differing = sum(a != b for a, b in zip(row["completion"], row["answer"], strict=True))
        assert differing == (0 if row["label"] else 1)
    tokenizer = Tokenizer.characters("0123456789+=")
    for example in task.train.examples[:8]:
        sample = teacher(tokenizer, gold="answer").labelled(example)
        assert tokenizer.decode(sample.completion_ids[:-1]) == example.columns["completion"]
