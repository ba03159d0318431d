"""The model that supervised training starts from: a checkpoint, or random weights with a character
tokenizer over the task's alphabet."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from isobit.config import ArchitectureConfig, SftConfig
from isobit.distributed import Ranks
from isobit.distributed.launch import check_alike
from isobit.errors import IsobitError
from isobit.kernels import Scoring, computed_by
from isobit.model import Experts, Model, ModelConfig, Tokenizer
from isobit.model.described import Described, described
from isobit.model.families import FAMILIES
from isobit.model.hub.linear_attention import LinearAttention
from isobit.model.hub.multipliers import Multipliers
from isobit.tasks.builtin import Task
from isobit.training.adapting import load_trained, model_named, text_rules
from isobit.training.running.machine import date_of


def initial_model(
    config: SftConfig,
    task: Task,
    ranks: Ranks,
    began: Mapping[str, Any],
    checkpoint: Path | None = None,
) -> Model:
    """The model, or its state in a `checkpoint` of the run, whose facts `began` has. Raises
    IsobitError for what is no model, and for random weights without an alphabet."""
    now = date_of(began, ranks)
    if config.model.path is not None:
        base = model_named(config.model.path)
        model = load_trained(config, base, checkpoint, ranks, now)
    elif checkpoint is not None:
        model = load_trained(config, checkpoint, checkpoint, ranks, now)
    else:
        model = _random(config, task, ranks, now)
    check_alike(ranks, computed_by(model.ops))  # one machine may have no compiler
    return model


def described_model(config: SftConfig, task: Task) -> Described:
    """The same without its weights."""
    if config.model.path is not None:
        adapter = None if config.adapter is None else config.adapter.init
        return described(model_named(config.model.path), adapter, text_rules(config))
    assert config.model.init is not None
    tokenizer = _tokenizer(config, task)
    return Described(architecture_of(config.model.init, tokenizer), tokenizer)


def _tokenizer(config: SftConfig, task: Task, now: datetime | None = None) -> Tokenizer:
    """Of characters, for random weights."""
    assert config.model.init is not None
    alphabet = config.model.init.vocabulary or task.alphabet
    if alphabet is None:
        raise IsobitError(
            f"model.init.vocabulary: task {task.name!r} has no alphabet of its own; give the "
            "characters"
        )
    return Tokenizer.characters(alphabet, text_rules(config, now))


def _random(config: SftConfig, task: Task, ranks: Ranks, now: datetime) -> Model:
    assert config.model.init is not None
    tokenizer = _tokenizer(config, task, now)
    given = (
        architecture_of(config.model.init, tokenizer),
        tokenizer,
        config.precision,
        config.seed,
        config.backend,
        config.consistency,
        ranks,
    )
    return Model.init(*given, masters=config.optimizer.masters)


def architecture_of(init: ArchitectureConfig, tokenizer: Tokenizer) -> ModelConfig:
    """What `model.init` describes, for this tokenizer."""
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
