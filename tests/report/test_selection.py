"""What a page takes of the completions: exact figures of prompts, an even choice under a budget,
tokens' texts."""

import json
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from isobit.monitor.report.heatmap import heat_maps, heat_section, shade
from isobit.monitor.report.rollouts import Visit, read_rollouts
from isobit.monitor.report.selection import coarse_to_fine, sample_completions
from isobit.monitor.report.solved import kind, prompt_table
from isobit.run.completions import pack


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As a run does: a member for each step."""
    path.write_bytes(
        b"".join(pack(of_step) for _, of_step in groupby(rows, key=itemgetter("step")))
    )
    return path


def row(
    step: int, prompt: str, reward: float | None, index: int = 0, **more: Any
) -> dict[str, Any]:
    return (
        {"step": step, "prompt": prompt, "prompt_index": index}
        | {"prompt_ids": [1, 2], "completion": "", "reward": reward}
        | more
    )


def test_numbers_are_cut_out_without_touching_texts(tmp_path: Path) -> None:
    """A text that looks like the lists is a text."""
    trap = 'x,"prompt_ids":[1,2],"completion_ids":[3]'
    path = write(
        tmp_path / "c.jsonl",
        [row(1, trap, 1.0, completion_ids=[1, 2, 3], rollout_logprobs=[-0.5, -1.0, -2])],
    )
    found = read_rollouts(path)
    assert list(found.visits) == [trap]
    assert next(found.rows(found.steps[1][0]))["completion_ids"] == [1, 2, 3]


def test_visits_of_a_prompt(tmp_path: Path) -> None:
    rows = [
        row(1, "a", 1.0),
        row(1, "a", 0.0),
        row(1, "b", None, 1),
        row(2, "a", 0.5, 2),
        row(2, "a", 0.75, 2),
    ]
    path = write(tmp_path / "c.jsonl", rows)
    with path.open("ab") as file:
        file.write(pack([row(3, "a", 1.0)])[:-1])  # half a step
    found = read_rollouts(path)
    assert found.count == 5
    assert found.solved_from == 1.0
    assert [(v.step, v.scored, v.mean, v.solved) for v in found.visits["a"]] == [
        (1, 2, 0.5, 1),
        (2, 2, 0.625, 0),
    ]
    assert "b" not in found.visits  # nothing of it was scored
    below = read_rollouts(write(tmp_path / "d.jsonl", [row(1, "a", 0.25), row(1, "a", -1.0)]))
    assert below.solved_from == 0.25


def test_the_interval_of_the_reward_is_over_prompts(tmp_path: Path) -> None:
    rows = [
        row(1, name, reward, i) for i, name in enumerate("abc") for reward in (float(i), float(i))
    ]
    found = read_rollouts(write(tmp_path / "c.jsonl", [*rows, row(2, "a", 1.0, 9)]))
    assert found.reward_intervals() == {
        1: pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    }  # Student's t, 2 degrees


@pytest.mark.parametrize(
    ("solved", "expected"),
    [
        ([4, 4], "always"),
        ([0, 0], "never"),
        ([1, 3], "learned"),
        ([1, 2], "sometimes"),
        ([2], "sometimes"),
        ([4], "always"),
    ],
)
def test_kinds_of_prompts(solved: list[int], expected: str) -> None:
    assert kind([Visit(i, 4, float(count), count) for i, count in enumerate(solved)]) == expected


def test_prompts_keep_their_counts_under_a_budget(tmp_path: Path) -> None:
    rows = [row(1, f"prompt {i}", float(i % 2), i) for i in range(500)] + [
        row(2, "prompt 7", 1.0, 501)
    ]
    table = prompt_table(read_rollouts(write(tmp_path / "c.jsonl", rows)), 5_000)
    assert table["counts"] == {"always": 250, "learned": 0, "sometimes": 0, "never": 250}
    assert table["total"] == 500
    assert 10 < len(table["rows"]) < 500
    assert table["rows"][0] | {"mean": 0} == {
        "prompt": "prompt 7", "kind": "always", "visits": 2, "mean": 0,
        "trend": [[1, 1.0], [2, 1.0]]
    }  # fmt: skip
    assert len(json.dumps(table["rows"])) < 10_000


def test_coarse_to_fine_is_every_item_once_ends_first() -> None:
    for count in range(1, 40):
        found = list(coarse_to_fine(range(count)))
        assert sorted(found) == list(range(count))
        assert found[:2] == [0, count - 1][:count]
    assert list(coarse_to_fine([])) == []


def test_a_budget_keeps_the_best_and_the_worst_of_steps_evenly_spread(tmp_path: Path) -> None:
    rows = [
        row(s, "p", float(i == 13) - float(i == 29), s, sample_index=i, completion="x" * 200)
        for s in range(1, 101)
        for i in range(40)
    ]
    found = read_rollouts(write(tmp_path / "c.jsonl", rows))
    samples = sample_completions(found, tmp_path, 100_000)
    assert len(json.dumps(samples)) < 110_000
    steps = sorted({r["step"] for r in samples["rows"]})
    assert 8 < len(steps) < 100
    assert {1, 100} <= set(steps)
    assert max(b - a for a, b in pairwise(steps)) <= 13
    for step in (1, 100):
        assert {1.0, -1.0} <= {r["reward"] for r in samples["rows"] if r["step"] == step}
    assert len(sample_completions(found, tmp_path, 10**8)["rows"]) == 4000


def byte_tokenizer(run: Path) -> None:
    """A tokenizer of single bytes, with which some characters are several tokens, and a special
    token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>"])
    folder = run / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    fast.save(str(folder / "tokenizer.json"))


def test_tokens_have_the_text_that_they_add(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "checkpoints" / "step-000001" / "tokenizer.json"))
    text = "aé€ 😀<b>"
    ids = [*fast.encode(text, add_special_tokens=False).ids, fast.token_to_id("<eos>")]
    logprobs = [-0.1 * i for i in range(len(ids))]
    policy = [value + 1e-3 * (i == 2) for i, value in enumerate(logprobs)]
    given = {"completion_ids": ids, "completion": text, "rollout_logprobs": logprobs}
    rows = [
        row(1, "p", 1.0, **given, policy_logprobs=policy),
        row(1, "p", 1.0, sample_index=1, **given, policy_logprobs=logprobs),
        row(1, "p", 1.0, sample_index=2, **given, policy_logprobs=None),
    ]
    samples = sample_completions(read_rollouts(write(tmp_path / "c.jsonl", rows)), tmp_path, 10**6)
    first, same, none = samples["rows"]
    pieces = [samples["pieces"][i] for i in first["pieces"]]
    assert pieces == ["a", "", "é", "", "", "€", " ", "", "", "", "😀", "<", "b", ">", "<eos>"]
    assert samples["special"] == [first["pieces"][-1]]
    assert first["differences"] == [0.0, 0.0, 0.001, *[0.0] * 12]
    assert same["differences"] == 0
    assert "differences" not in none
    assert first["logprobs"][:3] == [0, -0.1, -0.2]


@pytest.mark.parametrize(
    ("episode", "said"),
    [
        (
            {"turns": 2, "uses": [["add", None], ["add", "it raised"]]},
            "2 turns, 2 calls of tools, 1 failed",
        ),
        ({"turns": 1, "uses": []}, "1 turn"),
        ({"turns": 3, "uses": [["add", None]]}, "3 turns, 1 call of tools"),
        (None, None),
        ({"turns": "2", "uses": [["add"]]}, None),
        ({"turns": 2, "uses": [["add"], 7]}, "2 turns"),
        ([1], None),
    ],
)
def test_what_was_given_in_an_episode_is_told_apart(
    tmp_path: Path, episode: Any, said: str | None
) -> None:
    """The places of tokens that tools gave, and what happened, also of rows that say other
    things."""
    byte_tokenizer(tmp_path)
    given = {"completion_ids": [1, 2, 3], "rollout_logprobs": [-1.0, 0.0, -2.0], "completion": "c"}
    rows = [
        row(1, "p", 1.0, **given, completion_mask=[True, False, True], episode=episode),
        row(1, "p", 1.0, **given, completion_mask=None, sample_index=1),
    ]
    samples = sample_completions(read_rollouts(write(tmp_path / "c.jsonl", rows)), tmp_path, 10**6)
    first, plain = samples["rows"]
    assert first["given"] == [1]
    assert first.get("episode") == said
    assert "given" not in plain
    assert "episode" not in plain


def test_without_a_tokenizer_the_text_is_shown(tmp_path: Path) -> None:
    rows = [
        row(1, "p", 1.0, completion="text", completion_ids=[1, 2], rollout_logprobs=[-1.0, -2.0])
    ]
    found = read_rollouts(write(tmp_path / "c.jsonl", rows))
    damaged = tmp_path / "checkpoints" / "step-000001" / "tokenizer.json"
    for _ in range(2):
        shown = sample_completions(found, tmp_path, 10**6)["rows"][0]
        assert shown["text"] == "text"
        assert shown["length"] == 2
        damaged.parent.mkdir(parents=True, exist_ok=True)
        damaged.write_text("{")


def test_heat_maps_are_thinned_ordered_and_shaded() -> None:
    def figures(error: float) -> dict[str, Any]:
        return {"relative_error": [None, error], "flushed": [0.0, 1e-3]}

    records = [
        {"step": step, "tensors": {name: figures(0.03 if step == 500 else 0.02) for name in "ab"}}
        for step in range(1, 501)
    ]
    records[-1]["tensors"]["qkv"] = records[-1]["tensors"]["a"]
    maps = heat_maps(records)
    assert maps is not None
    assert maps["tensors"] == ["qkv", "a", "b"]
    assert (maps["steps"][0], maps["steps"][-1]) == (1, 500)
    assert len(maps["steps"]) <= 60
    assert maps["figures"]["relative_error"]["low"] == 0.02
    section = heat_section(maps)
    assert "<td class='q8'>3.00%</td>" in section
    assert "<td class='q0'>–</td>" in section
    assert heat_maps([]) is None
    assert [shade(v, 1e-7, 1e-2, True) for v in (0.0, 1e-7, 1e-2, 1.0)] == [0, 1, 8, 8]
    assert shade(None, 0.0, 1.0, False) == 0
