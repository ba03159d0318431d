"""Samples that wait in a checkpoint are tensors, and come back as they were; so do those of older
checkpoints, which are text."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isobit.config import load_config
from isobit.rl import Group, Sample
from isobit.rl.algorithm.credit import StepBatch
from isobit.rl.algorithm.samples import groups_from_json, groups_to_json
from isobit.run import checkpoints
from isobit.training.saving.checkpoint import problem_of
from isobit.training.saving.waiting import packed, unpacked
from isobit.training.train import resume, train
from tests.runs import fingerprint, write_config
from tests.strangers.cases import _sign

AHEAD = {"rollouts_ahead": 1, "replay": {"capacity": 8, "groups_per_step": 1}}


def samples(seed: int) -> Group:
    """Of one prompt, with each field there, absent or empty."""
    rng = random.Random(seed)

    def numbers(count: int) -> tuple[float, ...]:
        exact = rng.random() < 0.5
        found = [-rng.expovariate(1.0) for _ in range(count)]
        return tuple(struct.unpack("f", struct.pack("f", x))[0] if exact else x for x in found)

    made = []
    for index in range(rng.randint(1, 3)):
        length = rng.choice((0, 1, 5, 40))
        mask = tuple(rng.random() < 0.5 for _ in range(length)) if rng.random() < 0.5 else None
        count = length if mask is None else sum(mask)
        made.append(
            Sample(
                seed,
                index,
                tuple(rng.randrange(2**17) for _ in range(rng.randint(1, 9))),
                tuple(rng.randrange(2**17) for _ in range(length)),
                numbers(length),
                "text",
                False,
                3,
                rng.choice((None, 0.5)),
                {"math": 1.0},
                numbers(count) if rng.random() < 0.5 else None,
                completion_mask=mask,
                teacher_ids=tuple(range(rng.randint(0, 4))) if rng.random() < 0.5 else None,
            )
        )
    return made


def state_of(seed: int) -> dict[str, Any]:
    """The parts of a state that have samples, and another."""
    groups = [samples(10 * seed + i) for i in range(9)]
    batch = StepBatch(2, groups=groups[:2], scored=[groups[1], groups[4], groups[0]])
    found = {
        "step": 4,
        "pending": groups_to_json(groups[5:7]),
        "queue": [batch.to_json(), StepBatch(1).to_json()],
        "replay": groups_to_json(groups[7:]),
    }
    return found | ({"unfinished": groups_to_json(groups[2:3])} if seed % 2 else {})


@pytest.mark.parametrize("seed", range(20))
def test_samples_come_back_in_every_bit(seed: int) -> None:
    state = state_of(seed)
    plain, tensors = packed(state)
    again = unpacked(json.loads(json.dumps(plain)), tensors)
    state = json.loads(json.dumps(state))  # as an older checkpoint has it
    for name in {"pending", "replay", "unfinished"} & state.keys():
        assert groups_from_json(again[name]) == groups_from_json(state[name])
    for mine, theirs in zip(again["queue"], state["queue"], strict=True):
        assert StepBatch.from_json(mine, 2) == StepBatch.from_json(theirs, 2)
    assert again["queue"][0]["scored"][0] == 1  # it is the batch's own group, and written once
    assert unpacked(state, {}) == state


def test_numbers_take_32_bits_where_these_are_enough() -> None:
    sample = samples(0)[0].to_json() | {"completion_mask": None, "teacher_ids": None}
    kinds = {}
    for name, value in (("narrow", -0.5), ("wide", -0.1), ("large", 2**40)):
        ids = [value] if name == "large" else [7]
        one = sample | {"completion_ids": ids, "rollout_logprobs": [value], "reference_kl": None}
        found = packed({"pending": [[one]], "queue": [], "replay": []})[1]
        kinds[name] = found["completion_ids"].dtype, found["rollout_logprobs"].dtype
    assert kinds == {
        "narrow": (torch.int32, torch.float32),
        "wide": (torch.int32, torch.float64),
        "large": (torch.int64, torch.float32),
    }


@pytest.mark.parametrize(
    "harm",
    [
        lambda plain, tensors: plain["pending"][0][0].update(prompt_ids=10**9),
        lambda plain, tensors: plain["pending"][0][0].update(prompt_ids=-1),
        lambda plain, tensors: plain["pending"][0][0].update(prompt_ids=0),
        lambda plain, tensors: plain["pending"][0][0].update(prompt_ids=True),
        lambda plain, tensors: tensors.pop("prompt_ids"),
        lambda plain, tensors: tensors.update(more=torch.zeros(1)),
    ],
)
def test_columns_that_do_not_fit_are_refused(harm: Any) -> None:
    """The control: nothing is changed."""
    plain, tensors = packed(state_of(3))
    assert unpacked(plain, tensors)
    harm(plain, tensors)
    with pytest.raises((ValueError, KeyError)):
        unpacked(plain, tensors)


def test_a_run_goes_on_from_tensors_and_from_the_text_of_an_older_one(
    tmp_path: Path, base_model: Path
) -> None:
    """To the same bits as the run that never stopped; a checkpoint that says something else of its
    samples is not taken."""
    config = load_config(write_config(tmp_path, base_model, **AHEAD))
    whole = fingerprint(train(config, quiet=True).run_dir)
    ended = []
    for kind in ("tensors", "text"):
        at = load_config(
            write_config(tmp_path, base_model, **AHEAD), [f"run.dir={tmp_path / kind}", "steps=2"]
        )
        begun = train(at, quiet=True).run_dir
        checkpoint = checkpoints.newest(begun / "checkpoints")[0]
        state, waiting = (checkpoint / "trainer" / x for x in ("state.json", "waiting.safetensors"))
        plain, tensors = json.loads(state.read_text()), load_file(waiting)
        assert tensors["completion_ids"].numel() > 50
        assert all(type(s["completion_ids"]) is int for s in plain["queue"][0]["groups"][0])
        assert plain["queue"][0]["scored"] == list(range(4))
        if kind == "text":
            state.write_text(json.dumps(unpacked(plain, tensors)))
            waiting.unlink()
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            del manifest["trainer/waiting.safetensors"]
            (checkpoint / "manifest.json").write_text(json.dumps(manifest))
            _sign(checkpoint, "trainer/state.json")
        else:
            plain["queue"][0]["groups"][0][0]["completion_ids"] += 1
            before = state.read_text()
            state.write_text(json.dumps(plain))
            assert str(problem_of(checkpoint)).endswith("state.json: not the state of a run")
            state.write_text(before)
        resume(begun, ["steps=4"], quiet=True)
        ended.append(fingerprint(begun))
    assert ended == [whole, whole]


def test_a_damaged_file_of_samples_is_named(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the checkpoint before it is taken."""
    config = load_config(write_config(tmp_path, base_model, **AHEAD, steps=2))
    checkpoint = checkpoints.newest(train(config, quiet=True).run_dir / "checkpoints")[0]
    assert problem_of(checkpoint) is None
    waiting = checkpoint / "trainer" / "waiting.safetensors"
    waiting.write_bytes(waiting.read_bytes()[:-8])
    assert "waiting.safetensors: cannot be read" in str(problem_of(checkpoint))
    resume(Path(config.run.dir), ["steps=3"], quiet=True)
    said = capsys.readouterr().err
    assert "waiting.safetensors does not match its checksum); taking the one before it" in said
