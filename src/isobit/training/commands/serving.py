"""A model that serves several adapters, as `generate` and `eval` open it: frozen, without
masters."""

from collections.abc import Mapping
from pathlib import Path

from isobit.config.commands import NamedModel
from isobit.model import Model, TextRules
from isobit.model.adapters.targets import NewAdapter
from isobit.model.text.tokenizer import DEFAULT_RULES

Flow = tuple[str | Mapping[str, object], str, str]
"""(precision, backend, consistency)."""
_OF_NOTHING = NewAdapter(1, 1.0, ())
"""An adapter of no matrix: a model that is loaded with it is frozen, and reads each weight without
keeping it."""


def rules_of(model: NamedModel) -> TextRules:
    """Return the rules by which a command reads texts, of the model that it names."""
    return TextRules(
        chat_template=model.chat_template, chat_template_kwargs=model.chat_template_kwargs
    )


def open_frozen(path: Path, flow: Flow, rules: TextRules = DEFAULT_RULES) -> Model:
    """Return the model at `path` under `flow`, (precision, backend, consistency), without
    masters."""
    return Model.load(path, *flow, adapter=_OF_NOTHING, rules=rules)


def open_serving(
    path: Path,
    adapters: Mapping[str, Path],
    flow: Flow,
    rules: TextRules = DEFAULT_RULES,
) -> Model:
    """Return `open_frozen` with PEFT folders by name. Raises IsobitError as `Model.serving`."""
    return open_frozen(path, flow, rules).serving(adapters)
