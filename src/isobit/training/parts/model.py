"""The model that a run trains: all of its weights, or an adapter on it; of a supervised run also
random weights, with a character tokenizer over the task's alphabet."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from isobit.config import ArchitectureConfig, Config, SftConfig
from isobit.distributed import ALONE, Ranks
from isobit.distributed.launch import check_alike
from isobit.errors import IsobitError, brief
from isobit.kernels import Scoring, computed_by
from isobit.model import Experts, Model, ModelConfig, TextRules, Tokenizer
from isobit.model.adapters.peft import check_served
from isobit.model.adapters.targets import NewAdapter, beyond_use, targeted
from isobit.model.described import Described, described
from isobit.model.families import FAMILIES
from isobit.model.hub.checkpoint import model_folder
from isobit.model.hub.folders import from_hub_cache
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.hub.multipliers import Multipliers
from isobit.run.directory import model_directory
from isobit.tasks.builtin import Task
from isobit.training.running.machine import date_of


def model_named(path: str) -> Path:
    """Return the directory of the model that a config names: `path` itself, or the newest
    checkpoint of a run, or the snapshot of a name in the Hub's cache. Raises IsobitError for a run
    without a checkpoint."""
    return from_hub_cache(model_directory(Path(path)))


def text_rules(config: Config | SftConfig, now: datetime | None = None) -> TextRules:
    """Return the rules by which a config reads prompts; `now`: the date that prompts name."""
    model = config.model
    rule = config.task.special_tokens_in_content
    return TextRules(rule, now, model.chat_template, model.chat_template_kwargs)


def described_policy(config: Config | SftConfig, base: Path) -> Described:
    """Return the description of the model at `base`, with the tokenizer of the adapter that a run
    of the config begins with, where that brings one."""
    adapter = config.adapter
    init = None if adapter is None or adapter.init is None else str(model_named(adapter.init))
    return described(base, init, text_rules(config))


def shared_vocabulary(config: Config, base: Path) -> int | None:
    """Return the number of token ids that the policy at `base` and its teacher have in common: the
    tokenizer's, where their embeddings have other numbers of rows behind these; else None, and each
    model has all its rows. Raises IsobitError for a teacher that has another tokenizer."""
    if config.reference.path is None or not config.algorithm.kl_coefficient:
        return None
    policy, teacher_model = (
        described_policy(config, base),
        described(model_named(config.reference.path)),
    )
    ours, theirs = (model.tokenizer.fast.get_vocab() for model in (policy, teacher_model))
    if theirs != ours:
        word = min(
            word
            for word, token in ours.items() | theirs.items()
            if ours.get(word) != theirs.get(word)
        )
        raise IsobitError(
            f"reference.path: {config.reference.path} has another tokenizer than the policy: "
            f"{brief(word)!r} is token {theirs.get(word)} there and {ours.get(word)} here; a teacher "
            "reads the policy's tokens, so take one of its family"
        )
    same = policy.config.vocab_size == teacher_model.config.vocab_size
    return None if same else policy.tokenizer.vocab_size


def load_trained(
    config: Config | SftConfig,
    base: Path,
    checkpoint: Path | None = None,
    ranks: Ranks = ALONE,
    now: datetime | None = None,
    vocabulary: int | None = None,
    divided: int = 1,
) -> Model:
    """Load the model at `base`, or its state in a `checkpoint`, which holds only the adapter where
    the config has one, with a tokenizer that reads prompts as the run does; `now`: the date that
    prompts name; `vocabulary` and `divided`: as in `Model.load`. Raises IsobitError for an adapter
    that does not fit the config."""
    rules = text_rules(config, now)
    if checkpoint is not None:  # the template is saved in it
        rules = replace(rules, chat_template=None)
    flow = config.precision, config.backend, config.consistency, ranks
    lora, masters = config.adapter, config.optimizer.masters
    if lora is None:
        path = checkpoint or base
        model = Model.load(path, *flow, None, masters, rules, vocabulary, divided)
        if model.transformer.adapter is not None:
            raise IsobitError(
                f"model.path: {base} is an adapter; give its model, and the adapter as adapter.init"
            )
        return model
    new = NewAdapter(lora.rank, lora.alpha, lora.targets, config.seed, lora.rslora)
    init = None if lora.init is None else model_named(lora.init)
    if init is not None and checkpoint is None:
        check_served(model_folder(init, "adapter"), base)
    adapter_source = checkpoint or init or new
    model = Model.load(base, *flow, adapter_source, masters, rules, vocabulary, divided)
    adapter, wanted = model.transformer.adapter, targeted(model.config, lora.targets)
    assert adapter is not None
    settings = (lora.rank, lora.alpha, lora.rslora, wanted)
    if (adapter.rank, adapter.alpha, adapter.rslora, adapter.projections) != settings:
        raise IsobitError(
            f"adapter.init: {lora.init} is an {adapter}; set rank, alpha, rslora and targets to "
            "these"
        )
    return model


def model_warning(config: Config | SftConfig, model: Model | Described) -> str | None:
    """Return a warning for an adapter with a rank above the one that its matrices can use, or
    None."""
    adapter = config.adapter
    line = None if adapter is None else beyond_use(model.config, adapter.rank, adapter.targets)
    return None if line is None else f"warning: {line}"


def initial_model(
    config: SftConfig,
    task: Task,
    ranks: Ranks,
    began: Mapping[str, Any],
    checkpoint: Path | None = None,
    divided: int = 1,
) -> Model:
    """Return the model, or its state in a `checkpoint` of the run, whose facts `began` has, held
    together by `divided` of the ranks. Raises IsobitError for a path without a model, and for
    random weights without an alphabet."""
    now = date_of(began, ranks)
    if config.model.path is None and checkpoint is None:
        model = _random(config, task, ranks, now, divided)
    else:
        base = checkpoint if config.model.path is None else model_named(config.model.path)
        assert base is not None
        model = load_trained(config, base, checkpoint, ranks, now, divided=divided)
    check_alike(ranks, computed_by(model.ops))  # one machine may have no compiler
    return model


def described_model(config: SftConfig, task: Task) -> Described:
    """Return the description of the model without its weights."""
    if config.model.path is not None:
        return described_policy(config, model_named(config.model.path))
    assert config.model.init is not None
    tokenizer = _tokenizer(config, task)
    return Described(architecture_of(config.model.init, tokenizer), tokenizer)


def _tokenizer(config: SftConfig, task: Task, now: datetime | None = None) -> Tokenizer:
    """Return a tokenizer of characters, for random weights."""
    assert config.model.init is not None
    alphabet = config.model.init.vocabulary or task.alphabet
    if alphabet is None:
        raise IsobitError(
            f"model.init.vocabulary: task {task.name!r} has no alphabet of its own; give the "
            "characters"
        )
    return Tokenizer.characters(alphabet, text_rules(config, now))


def _random(config: SftConfig, task: Task, ranks: Ranks, now: datetime, divided: int) -> Model:
    assert config.model.init is not None
    tokenizer = _tokenizer(config, task, now)
    arguments = (
        architecture_of(config.model.init, tokenizer),
        tokenizer,
        config.precision,
        config.seed,
        config.backend,
        config.consistency,
        ranks,
    )
    return Model.init(*arguments, masters=config.optimizer.masters, divided=divided)


def architecture_of(init: ArchitectureConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the architecture that `model.init` describes, for this tokenizer."""
    family, head_dim = FAMILIES[init.family], init.head_dim or init.hidden_size // init.num_heads
    scoring = None if family.mixtures is None else family.mixtures.scoring
    linear = (
        LinearAttention.like(
            init.num_heads, head_dim, init.num_layers, family.linear_attention == "by head"
        )
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
        qk_norm=bool(family.qk_norm),
        linear=linear,
        unrotated=()
        if family.unrotated is None
        else family.unrotated({"position_embedding_type": "rope"}, "model.init", init.num_layers),
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
            scoring=None if scoring is None else Scoring(*scoring),
        ),
    )
