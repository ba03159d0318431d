"""The model that a run trains: all of its weights, or an adapter on it."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from isobit.config import Config, SftConfig
from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError, brief
from isobit.model import Model, TextRules
from isobit.model.adapters.peft import check_served
from isobit.model.adapters.targets import NewAdapter, beyond_use, targeted
from isobit.model.described import Described, described
from isobit.model.families import FAMILIES
from isobit.model.hub.checkpoint import model_folder
from isobit.run.directory import model_directory


def model_named(path: str) -> Path:
    """Return the directory of the model that a config names: `path` itself, or the newest
    checkpoint of a run. Raises IsobitError for a run without a checkpoint."""
    return model_directory(Path(path))


def text_rules(config: Config | SftConfig, now: datetime | None = None) -> TextRules:
    """Return the rules by which a config reads prompts; `now`: the date that prompts name."""
    model = config.model
    rule = config.task.special_tokens_in_content
    return TextRules(rule, now, model.chat_template, model.chat_template_kwargs)


def shared_vocabulary(config: Config, base: Path) -> int | None:
    """Return the number of token ids that the policy at `base` and its teacher have in common: the
    tokenizer's, where their embeddings have other numbers of rows behind these; else None, and each
    model has all its rows. Raises IsobitError for a teacher that has another tokenizer."""
    if config.reference.path is None:
        return None
    teacher, adapter = model_named(config.reference.path), config.adapter
    init = None if adapter is None or adapter.init is None else str(model_named(adapter.init))
    policy, other = described(base, init), described(teacher)
    ours, theirs = (each.tokenizer.fast.get_vocab() for each in (policy, other))
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
    same = policy.config.vocab_size == other.config.vocab_size
    return None if same else policy.tokenizer.vocab_size


def load_trained(
    config: Config | SftConfig,
    base: Path,
    checkpoint: Path | None = None,
    ranks: Ranks = ALONE,
    now: datetime | None = None,
    vocabulary: int | None = None,
) -> Model:
    """Load the model at `base`, or its state in a `checkpoint`, which holds only the adapter where
    the config has one, with a tokenizer that reads prompts as the run does; `now`: the date that
    prompts name; `vocabulary`: as in `Model.load`. Raises IsobitError for an adapter that does not
    fit the config."""
    rules = text_rules(config, now)
    if checkpoint is not None:  # the template is saved in it
        rules = replace(rules, chat_template=None)
    flow = config.precision, config.backend, config.consistency, ranks
    given, masters = config.adapter, config.optimizer.masters
    if given is None:
        path = checkpoint or base
        model = Model.load(path, *flow, masters=masters, rules=rules, vocabulary=vocabulary)
        if model.transformer.adapter is not None:
            raise IsobitError(
                f"model.path: {base} is an adapter; give its model, and the adapter as adapter.init"
            )
        return model
    new = NewAdapter(given.rank, given.alpha, given.targets, config.seed, given.rslora)
    init = None if given.init is None else model_named(given.init)
    if init is not None and checkpoint is None:
        check_served(model_folder(init, "adapter"), base)
    own = checkpoint or init or new
    model = Model.load(base, *flow, own, masters, rules, vocabulary)
    found, wanted = model.transformer.adapter, targeted(model.config, given.targets)
    assert found is not None
    settings = (given.rank, given.alpha, given.rslora, wanted)
    if (found.rank, found.alpha, found.rslora, found.projections) != settings:
        raise IsobitError(
            f"adapter.init: {given.init} is an {found}; set rank, alpha, rslora and targets to "
            "these"
        )
    return model


def model_warning(config: Config | SftConfig, model: Model | Described) -> str | None:
    """Return a warning for an adapter with a rank above the one that its matrices can use, or for a
    model that reads images too, of which only the language model is saved; or None."""
    given, architecture = config.adapter, FAMILIES[model.config.family].architecture
    if given is not None:
        line = beyond_use(model.config, given.rank, given.targets)
    elif model.config.wrapped:
        line = (
            f"{config.model.path} reads images too: its language model is trained, and saved alone, "
            f"as {architecture}; an adapter (adapter.rank) is saved for the whole model"
        )
    else:
        line = None
    return None if line is None else f"warning: {line}"
