"""Models that wrap a language model, to read images or to hear: the language model's part of their
config.json, and the names of its modules inside them."""

from collections.abc import Mapping
from typing import Any

from isobit.errors import IsobitError, listed
from isobit.model.families import FAMILIES
from isobit.model.families.family import Family, Inner
from isobit.options.families import nearest

INNER = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of the language model's part of a config.json."""
_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Models whose published config.json has the language model's keys among its own."""
_TIED_BY_EITHER = (*_FLAT, "llava", "llava_onevision")
_OUTSIDE = ("tie_word_embeddings", "quantization_config") + tuple(
    f"{token}_token_id" for token in ("bos", "eos", "pad")
)
ALONE = "model."
_INSIDE = ("model.language_model.", "language_model.model.")
_SENSES = {"vision_config": "images", "visual_config": "images", "audio_config": "sound"}


def text_of(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the language model's values of a model that reads images too and whose language model
    is read; values outside the language model's part count where that part does not have them.
    Raises IsobitError for another model around a language model."""
    name = values.get("model_type")
    text = next((values[key] for key in INNER if isinstance(values.get(key), dict)), None)
    if text is None and name in _FLAT:
        text = {**values, "model_type": f"{name}_text"}
    if text is None or (isinstance(name, str) and name in FAMILIES):
        return values
    inner = text.get("model_type")
    known, inside = _kind_of(inner)
    family = FAMILIES.get(known)
    if family is not None and name in family.wrappers:
        outside = {key: values[key] for key in _OUTSIDE if key in values}
        text = {
            **family.sizes,
            **inside.defaults,
            **outside,
            **text,
            **inside.fixed,
            "model_type": known,
        }
        return _with_one_axis(text) | _tied(values, text, str(name))
    seen = dict.fromkeys(word for key, word in _SENSES.items() if isinstance(values.get(key), dict))
    kind = f"a model for {' and '.join(seen)} that wraps" if seen else "a model around"
    model = "a language model of its own" if inner is None else f"a language model, {inner!r:.80}"
    right = f"whose config.json says {known}" if family is not None else f"of {', '.join(FAMILIES)}"
    model = model if family is not None else f"{model}{nearest(inner)}"
    raise IsobitError(
        f"{where}: unsupported architecture {name or architectures(values)!r:.80}: {kind} {model}; "
        f"only models of text are read: give a checkpoint of the language model alone, {right}"
    )


def _kind_of(inner: object) -> tuple[str, Inner]:
    """Return the family of a language model by its model_type inside another model, "" where it is
    not read, and what that model_type stands for there."""
    for name, family in FAMILIES.items():
        if isinstance(inner, str) and inner in family.inside:
            return name, family.inside[inner]
    return (inner if isinstance(inner, str) else ""), Inner({})


def _with_one_axis(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the plain rotary embedding that `mrope` is where positions have one
    axis: where there is only text."""
    plain = dict(text)
    for key in ("rope_scaling", "rope_parameters"):
        section = text.get(key)
        if isinstance(section, dict) and section.get("rope_type", section.get("type")) == "mrope":
            plain[key] = {**section, "rope_type": "default"}
    return plain


def _tied(values: Mapping[str, Any], text: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what says whether the head is the embedding, as transformers decides: the value
    outside the language model's part, if it is there; in some models true if either is."""
    key = "tie_word_embeddings"
    outer, inner = values.get(key), text.get(key)
    if name in _TIED_BY_EITHER and inner is True:
        outer = inner
    return {} if outer is None else {key: outer}


def is_wrapped(values: Mapping[str, Any], family: Family) -> bool:
    """Return whether the class of a config.json's checkpoint has the language model of this
    `family` inside, not alone."""
    named = values.get("architectures")
    alone = isinstance(named, list) and family.architecture in named
    return values.get("model_type") in family.wrappers and not alone


def classes_of(wrapped: bool, family: Family) -> tuple[str, ...]:
    """Return how the names of a language model's modules begin in each class by which transformers
    (4.52 and later) opens the model around it, or the language model alone."""
    if not wrapped:
        return (ALONE,)
    return (_INSIDE[0], ALONE) if family.opened_alone else _INSIDE[:1]


def renamed(name: str, prefix: str) -> str:
    """Return the name of a language model's layer in a class whose names begin with `prefix`."""
    return prefix + name.removeprefix(prefix_of(name))


def prefix_of(name: str) -> str:
    """Return how the name of a language model's layer begins: as in the model alone, or as inside
    another, which transformers before 4.52 named otherwise; "" for another module."""
    known = (*_INSIDE, ALONE)
    return next((prefix for prefix in known if name.startswith(f"{prefix}layers.")), "")


def family_of(values: Mapping[str, Any], where: str) -> str:
    """Return the family of a language model's config.json. Raises IsobitError for others."""
    name = values.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return name
    raise IsobitError(
        f"{where}: unsupported architecture {name or architectures(values)!r:.80}{nearest(name)}: "
        f"supported are {', '.join(FAMILIES)}"
    )


def architectures(values: Mapping[str, Any]) -> str:
    """Return the class names that config.json gives, for a message."""
    named = values.get("architectures")
    return listed(named) if isinstance(named, list) and named else "none"
