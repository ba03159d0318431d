"""Supervised training on prompt/completion data, before RL: `isobit sft`, and the cached base model
of a run.

Cross-entropy on completion tokens, under the same model, precision and optimizer as RL. Left out:
resuming; a supervised run here is short, and its result is cached by a hash of its config.
"""

import fcntl
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isobit import __version__
from isobit.config import ArchitectureConfig, SftConfig, dump_config, load_sft_config
from isobit.data.dataset import Dataset, Example
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import IsobitError, RunFailed
from isobit.evaluation.measure import EvaluationPlan, measure
from isobit.model import Experts, Model, ModelConfig, Tokenizer
from isobit.model.families import FAMILIES
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.hub.multipliers import Multipliers
from isobit.monitor.report.intervals import Estimate, proportion
from isobit.monitor.screen import Display
from isobit.options.consistency import resolved
from isobit.precision import precision_from
from isobit.rewards.pool import RewardPool
from isobit.rl import learning_rate
from isobit.rl.learner.supervised import supervised_update
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.run import durable
from isobit.run.directory import Interruption, occupied
from isobit.tasks import Task, load_task
from isobit.training.adapting import load_trained, rank_warning, text_rules
from isobit.training.rollouts.lengths import encode_prompt, keep, outside, say_special_tokens
from isobit.training.sft.taught import SupervisedSample, Teacher


def supervised_run(
    config: SftConfig, *, quiet: bool = False, interruption: Interruption | None = None
) -> Path:
    """Train and write a model directory to `config.out`; returns it. Interrupted, it finishes its
    step, writes the model as it is then, and says so; before the first step it writes none. Raises
    IsobitError for bad data or models.
    """
    out = Path(config.out)
    if what := occupied(out):
        raise IsobitError(
            f"{out} exists and {what}; sft begins anew and goes on with none: choose another "
            "(--out, or out=...)"
        )
    task = load_task(replace(config.task, seed=config.seed))
    model = _initial_model(config, task)
    task, taught = _fit(task, model, config, quiet)
    if not quiet and (warning := rank_warning(config, model)) is not None:
        print(warning, file=sys.stderr)
    interruption = interruption or Interruption()  # which nothing sets
    with Evaluation(model, task, config) as evaluation:
        done = _train(
            model, config, _batches(config, task.train, taught), evaluation, quiet, interruption
        )
        if done:
            _save(model, out)
        if interruption.signal is not None and done < config.steps:
            _say_unfinished(config, out, done)
        elif not quiet:
            _say(config, out, evaluation)
    return out


def _say_unfinished(config: SftConfig, out: Path, done: int) -> None:
    if done:
        text = (
            f"interrupted after step {done} of {config.steps}: what is in {out} is "
            "unfinished, and sft cannot go on"
        )
    else:
        text = f"interrupted before the first step was done: nothing is written to {out}"
    print(text, file=sys.stderr)


def _say(config: SftConfig, out: Path, evaluation: "Evaluation") -> None:
    what = "base model" if config.adapter is None else "adapter"
    print(f"{what} in {out}", file=sys.stderr)
    if evaluation.possible:
        print(f"held-out greedy accuracy  {evaluation.accuracy()}", file=sys.stderr)


def _save(model: Model, out: Path) -> None:
    """All of it or nothing."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".sft-") as temporary:
            model.save(Path(temporary) / "model", model.transformer.masters.dtype)
            durable.put_in_place(Path(temporary) / "model", out)
    except OSError as error:
        raise RunFailed(f"cannot save model {out}: {error.strerror or error}") from None


def cached_model(
    path: str, began: Mapping[str, Any] = MappingProxyType({}), *, quiet: bool = False
) -> Path:
    """The model of a config of `isobit sft`: from the cache if it was made before, else made now;
    by one process at a time. `began`: the facts of the run that goes on with it. Raises IsobitError
    where the cache cannot be written."""
    config = load_sft_config(path, began=began)
    if config.adapter is not None:
        raise IsobitError(
            f"model.sft: {path} trains an adapter; run isobit sft, and take its folder as "
            "adapter.init"
        )
    task = load_task(replace(config.task, seed=config.seed))
    place = cache_directory() / "sft" / _identity(config, task)
    made = place / "config.json"
    if made.is_file():
        return place
    try:
        durable.make_directory(place.parent)
        lock = (place.parent / f".{place.name}.lock").open("w")
    except OSError as error:
        raise IsobitError(
            f"cannot write the cache {place.parent}: {error.strerror}; set ISOBIT_CACHE"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
        if not made.is_file():
            if not quiet:
                print(f"making the base model of {path}, once", file=sys.stderr)
            supervised_run(replace(config, out=str(place)), quiet=quiet)
    return place


def _identity(config: SftConfig, task: Task) -> str:
    """A hash of all that the model is made from: the config, what its precision is, the examples,
    the weights it starts from, isobit's version."""
    settings = dump_config(replace(config, out=""))
    given, found = (
        f"consistency: {each}\n" for each in (config.consistency, resolved(config.consistency))
    )
    settings = settings.replace(given, found)
    formats = precision_from(config.precision).formats()
    digest = hashlib.sha256(f"{__version__}\n{settings}{formats}".encode())
    for example in task.train.examples:
        digest.update(
            json.dumps([example.prompt, example.columns], sort_keys=True, default=str).encode()
        )
        if example.answer is not None:
            digest.update(json.dumps(example.answer, sort_keys=True).encode())
    files = [] if config.model.path is None else sorted(Path(config.model.path).glob("*.*"))
    if config.model.chat_template is not None:
        files.append(Path(config.model.chat_template))
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    """$ISOBIT_CACHE, or ~/.cache/isobit."""
    return Path(os.environ.get("ISOBIT_CACHE") or Path.home() / ".cache" / "isobit")


def _initial_model(config: SftConfig, task: Task) -> Model:
    if config.model.path is not None:
        return load_trained(config, Path(config.model.path))
    assert config.model.init is not None
    alphabet = config.model.init.vocabulary or task.alphabet
    if alphabet is None:
        raise IsobitError(
            f"model.init.vocabulary: task {task.name!r} has no alphabet of its own; give the "
            "characters"
        )
    tokenizer = Tokenizer.characters(alphabet, text_rules(config))
    architecture = _architecture(config.model.init, tokenizer)
    given = (
        architecture,
        tokenizer,
        config.precision,
        config.seed,
        config.backend,
        config.consistency,
    )
    return Model.init(*given, masters=config.optimizer.masters)


def _architecture(init: ArchitectureConfig, tokenizer: Tokenizer) -> ModelConfig:
    family, head_dim = FAMILIES[init.family], init.head_dim or init.hidden_size // init.num_heads
    linear = (
        LinearAttention.like(init.num_heads, head_dim, init.num_layers)
        if family.linear_attention
        else None
    )
    return ModelConfig(
        family=init.family,
        vocab_size=tokenizer.vocab_size,
        hidden_size=init.hidden_size,
        intermediate_size=init.intermediate_size,
        num_layers=init.num_layers,
        num_heads=init.num_heads,
        num_kv_heads=init.num_kv_heads or init.num_heads,
        head_dim=head_dim,
        rope=family.fresh_rope(init.rope_theta, init.max_positions),
        qkv_bias=family.qkv_bias or family.biased,
        o_bias=family.biased and family.output_bias,
        qk_norm=family.qk_norm,
        linear=linear,
        unrotated=()
        if family.unrotated is None
        else family.unrotated({}, "model.init", init.num_layers),
        tie_embeddings=init.tie_embeddings,
        max_positions=init.max_positions,
        eos_ids=tokenizer.eos_ids,
        multipliers=Multipliers(attention=head_dim**-0.5) if family.multipliers else None,
        experts=None
        if init.num_experts is None
        else Experts(
            init.num_experts,
            init.experts_per_token or 2,
            init.intermediate_size,
            shared=init.intermediate_size if family.mixtures and family.mixtures.shared else 0,
        ),
    )


def _train(
    model: Model,
    config: SftConfig,
    batches: Iterator[list[SupervisedSample]],
    evaluation: "Evaluation",
    quiet: bool,
    interruption: Interruption,
) -> int:
    """How many steps were done."""
    every, stop_at = config.evaluation.every, config.evaluation.stop_at
    if every and not evaluation.possible:
        raise IsobitError(
            f"evaluation.every: task {config.task.name!r} has nothing held out, or no reward, "
            "to evaluate with"
        )
    tokens = config.optimizer.micro_batch_tokens
    if tokens == "auto":
        raise IsobitError("optimizer.micro_batch_tokens: auto is for RL runs; sft takes a number")
    settings = replace(config.optimizer, total_steps=config.steps, seed=config.seed)
    optimizer = ShardedOptimizer.of(model, settings)
    recompute = config.optimizer.activation_checkpointing
    bad_steps, done = 0, 0
    with Display(config.steps, quiet, name=config.out, details="supervised") as display:
        while done < config.steps and interruption.signal is None:
            rate = learning_rate(done, settings)
            metrics = supervised_update(model, optimizer, next(batches), rate, tokens, recompute)
            bad_steps = bad_steps + 1 if metrics["steps/skipped"] else 0
            if bad_steps >= config.optimizer.max_bad_steps:
                raise RunFailed(
                    f"sft: {bad_steps} steps in a row had a loss or gradient that is not finite"
                )
            model.sync()
            display.step(metrics)
            done += 1
            if every and done % every == 0 and interruption.signal is None:
                found = evaluation.accuracy()
                display.note(f"step {done}: held-out greedy accuracy {found}")
                if stop_at is not None and found.value >= stop_at:
                    break
    return done


def _batches(
    config: SftConfig, train: Dataset, taught: Mapping[int, SupervisedSample]
) -> Iterator[list[SupervisedSample]]:
    cursor = 0
    while True:
        yield [taught[train.at(cursor + i).index] for i in range(config.batch_size)]
        cursor += config.batch_size


def _fit(
    task: Task, model: Model, config: SftConfig, quiet: bool
) -> tuple[Task, dict[int, SupervisedSample]]:
    """The task without examples that are too long, which stop the run unless they are dropped, and
    what is learned of each training example, by its index."""
    context, teacher = model.config.max_positions, Teacher(task, model)
    taught: list[tuple[Example, SupervisedSample]] = []

    def problem(example: Example) -> str | None:
        sample = teacher.sample(example)
        taught.append((example, sample))
        prompt, completion = len(sample.prompt_ids), len(sample.completion_ids)
        if prompt + completion > context:
            both = f"a prompt of {prompt} tokens with a completion of {completion}"
            return f"{both} exceeds the model's context of {context}"
        return outside(prompt, config.task)

    def unanswerable(example: Example) -> str | None:
        tokens = len(encode_prompt(example, model))
        full = f"the prompt has {tokens} tokens, which fill the model's context of {context}"
        return full if tokens >= context else outside(tokens, config.task)

    train = keep(task.train, problem, config.task, "training", quiet)
    if not quiet:
        say_special_tokens(train.examples, model)
        teacher.say(taught)
    samples = {example.index: sample for example, sample in taught}
    if not task.rewards:  # there is no evaluation at the end
        return replace(task, train=train), samples
    held_out = keep(task.held_out, unanswerable, config.task, "held-out", quiet)
    return replace(task, train=train, held_out=held_out), samples


class Evaluation:
    """Greedy accuracy on held-out prompts; the engine and the rewards' processes are opened once,
    where they are needed."""

    def __init__(self, model: Model, task: Task, config: SftConfig) -> None:
        self._model, self._task, self._new_tokens = model, task, config.max_new_tokens
        self._examples = task.held_out.examples[: config.evaluation.samples]
        self._open = ExitStack()

    def __enter__(self) -> "Evaluation":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def possible(self) -> bool:
        return bool(self._examples and self._task.rewards)

    def accuracy(self) -> Estimate:
        engine, pool = self._parts
        answered = measure(
            engine, self._examples, pool, EvaluationPlan(Sampling(max_new_tokens=self._new_tokens))
        )
        return proportion(sum(question.greedy.correct for question in answered), len(answered))

    @cached_property
    def _parts(self) -> tuple[Engine, RewardPool]:
        prompts = [example.prompt for example in self._examples]
        engine = Engine.sized_for(self._model, prompts, len(prompts), self._new_tokens)
        return engine, self._open.enter_context(RewardPool(self._task.rewards))
