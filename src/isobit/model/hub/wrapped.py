"""Models that wrap a language model, to read images or to hear: the language model's part of their
config.json."""

from collections.abc import Mapping
from typing import Any

from isobit.errors import IsobitError, listed
from isobit.model.families import FAMILIES
from isobit.options.families import nearest

_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
_OUTSIDE = ("tie_word_embeddings", "quantization_config") + tuple(
    f"{token}_token_id" for token in ("bos", "eos", "pad")
)
_SENSES = {"vision_config": "images", "visual_config": "images", "audio_config": "sound"}


def text_of(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Of a model that reads images too, and whose language model is read, the language model's
    values; those beside it count where it has none. Raises IsobitError for another model around a
    language model."""
    name = values.get("model_type")
    text = next((values[key] for key in _INNER if isinstance(values.get(key), dict)), None)
    if text is None or (isinstance(name, str) and name in FAMILIES):
        return values
    inner = text.get("model_type")
    family = FAMILIES.get(inner) if isinstance(inner, str) else None
    if family is not None and name in family.wrappers:
        outside = {key: values[key] for key in _OUTSIDE if key in values}
        return {**family.sizes, **outside, **text}
    seen = dict.fromkeys(word for key, word in _SENSES.items() if isinstance(values.get(key), dict))
    kind = f"a model for {' and '.join(seen)} that wraps" if seen else "a model around"
    one = "a language model of its own" if inner is None else f"a language model, {inner!r:.80}"
    right = f"whose config.json says {inner}" if family is not None else f"of {', '.join(FAMILIES)}"
    one = one if family is not None else f"{one}{nearest(inner)}"
    raise IsobitError(
        f"{where}: unsupported architecture {name or architectures(values)!r:.80}: {kind} {one}; "
        f"only models of text are read: give a checkpoint of the language model alone, {right}"
    )


def architectures(values: Mapping[str, Any]) -> str:
    """The class names that config.json gives, for a message."""
    named = values.get("architectures")
    return listed(named) if isinstance(named, list) and named else "none"
