"""Tokens per second of rollouts with drafts (`engine.num_speculative_tokens: auto`) beside the same
rollouts without, which sample the same tokens.

A policy that has learned 12 answers of GSM8K by supervised training, not quite by heart, samples
groups of answers to its questions, for the second time and later: what it sampled before is known.
`GSM8K` names the data's `train.jsonl`, and `TOKENIZER` the directory of a model whose tokenizer is
taken. What is learned is a model of hidden 64; what samples is this model with as many zeros around
it as a model of hidden 512 has, which computes the same distributions at that model's cost. The
mean log-probability of the sampled tokens says how predictable they are. Seconds are those of the
processor, of one thread: they are hardly longer beside other processes. Left out: tools and what
they say, and texts that nobody has said before.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
import yaml
from torch import Tensor

from benchmarks.common import Result, Row, race
from isobit import Engine, Model, Sampling
from isobit.config import load_sft_config
from isobit.engine.types import Completion
from isobit.model import ModelConfig, Tokenizer
from isobit.training.train import train_supervised

ANSWERS, STEPS, NEW = 12, 160, 160
LAYERS, HIDDEN, HEAD = 2, 64, 32
WIDE, WIDE_LAYERS = 512, 8
WARMUP = 2  # rounds that are not counted, after which answers have been said before
CASES = ((1, 1), (1, 4), (1, 8), (4, 8))
"""Prompts, and samples of each."""


def run(rounds: int) -> Result:
    result = Result("speculation")
    data, tokenizer = os.environ.get("GSM8K"), os.environ.get("TOKENIZER")
    if data is None or tokenizer is None:
        raise SystemExit("speculation: GSM8K must name a train.jsonl, and TOKENIZER a model")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
        rows = [row for row in rows if len(row["question"]) + len(row["answer"]) < 420][:ANSWERS]
        questions = [row["question"] + "\n" for row in rows]
        model = _widened(_taught(folder, questions, [row["answer"] for row in rows], tokenizer))
        for prompts, samples in CASES:
            _compete(model, questions[:prompts], samples, rounds, result)
    return result


def _compete(
    model: Model, prompts: Sequence[str], samples: int, rounds: int, result: Result
) -> None:
    """The contestants sample the same tokens, each round with another seed."""
    case = f"batch {len(prompts) * samples}"
    engines = {
        name: Engine(model, kv_pages=1024, num_speculative_tokens=most)
        for name, most in (("one token a step", 0), ("with drafts", "auto"))
    }
    said: dict[str, list[list[Completion]]] = {name: [] for name in engines}

    def sampling(name: str) -> Callable[[], None]:
        seeds = count()

        def call() -> None:
            one = Sampling(n=samples, max_new_tokens=NEW, seed=next(seeds))
            groups = engines[name].generate(prompts, one)
            said[name].append([completion for group in groups for completion in group])

        return call

    timed = race(
        case,
        {name: sampling(name) for name in engines},
        rounds,
        warmup=WARMUP,
        clock=time.process_time,
    )
    plain, drafted = (said[name] for name in engines)
    assert plain == drafted, "drafts have changed a bit"
    tokens = [sum(len(c.token_ids) for c in each) for each in plain]
    mean = sum(tokens[WARMUP:]) / rounds
    result.rows += [replace(row, rate=mean / row.median_s, unit="tokens/s") for row in timed]
    logprobs = [value for each in plain for c in each for value in c.logprobs]
    stats = engines["with drafts"].stats
    found = {
        "mean log-probability": (sum(logprobs) / len(logprobs), "nats"),
        "steps without drafts": (float(engines["one token a step"].stats.steps), "steps"),
        "steps with drafts": (float(stats.steps), "steps"),
        "acceptance rate": (stats.num_accepted_tokens / max(stats.num_draft_tokens, 1), ""),
        "acceptance length": (1 + stats.num_accepted_tokens / max(stats.num_drafts, 1), "tokens"),
    }
    result.rows += [Row(case, what, 0.0, 0.0, *each) for what, each in found.items()]


def _taught(
    folder: Path, questions: Sequence[str], answers: Sequence[str], tokenizer: str
) -> Model:
    """A small model that has learned these answers."""
    known = Tokenizer.load(tokenizer)
    config = ModelConfig(
        "qwen3", 512, HIDDEN, 3 * HIDDEN, LAYERS, HIDDEN // HEAD, HIDDEN // HEAD, HEAD,
        qk_norm=True, tie_embeddings=True, max_positions=512, eos_ids=known.eos_ids,
    )  # fmt: skip
    Model.init(config, known, "float32", seed=0).save(folder / "start")
    pairs = [{"prompt": q, "completion": a} for q, a in zip(questions, answers, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    values = {
        "model": str(folder / "start"),
        "task": {"path": str(folder / "rows.jsonl"), "held_out_size": 1},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 10},
        "steps": STEPS,
        "batch_size": ANSWERS,
        "run": {"dir": str(folder / "run"), "report": False},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(values))
    train_supervised(load_sft_config(folder / "sft.yaml"))
    newest = sorted((folder / "run" / "checkpoints").iterdir())[-1]
    return Model.load(newest, "fp8")


def _widened(small: Model) -> Model:
    """The same function at the cost of a larger model: zeros around each matrix, and layers that
    add nothing. A norm's mean is over more elements, so its weights are smaller."""
    config = replace(
        small.config, hidden_size=WIDE, intermediate_size=3 * WIDE, num_layers=WIDE_LAYERS,
        num_heads=WIDE // HEAD, num_kv_heads=WIDE // HEAD,
    )  # fmt: skip
    model = Model.init(config, small.tokenizer, "fp8", seed=0)
    given = small.named_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters().items():
            kind = name.rpartition(".")[2]
            if kind in ("q_norm", "k_norm") and name in given:
                parameter.copy_(given[name])
            elif parameter.ndim == 1:
                parameter.zero_()
                if name in given:
                    parameter[:HIDDEN] = given[name] * (HIDDEN / WIDE) ** 0.5
            else:
                parameter.zero_()
                if name in given:
                    _place(parameter, given[name], {"qkv": 3, "gate_up": 2}.get(kind, 1))
    model.sync()
    return model


def _place(wide: Tensor, small: Tensor, parts: int) -> None:
    """Each of the parts of a fused matrix at the beginning of its part."""
    for target, source in zip(wide.chunk(parts), small.chunk(parts), strict=True):
        target[: source.shape[0], : source.shape[1]] = source
