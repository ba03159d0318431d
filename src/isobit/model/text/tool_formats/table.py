"""Formats by name, and which one a chat template writes."""

from collections.abc import Mapping

from isobit.errors import IsobitError, did_you_mean
from isobit.model.text.tool_formats.base import ToolFormat
from isobit.model.text.tool_formats.harmony import HARMONY
from isobit.model.text.tool_formats.mistral import MISTRAL
from isobit.model.text.tool_formats.pythonic import PYTHONIC
from isobit.model.text.tool_formats.tagged import HERMES, QWEN3_CODER
from isobit.model.text.tool_formats.whole import JSON, LLAMA3_JSON

FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "pythonic": PYTHONIC,
    "json": JSON,
}
_SHOWN = (
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ('"parameters"', "llama3_json"),
)
"""What a template has in it, and the format that this shows."""


def format_of(name: str, template: str | None) -> ToolFormat:
    """The format of this name; `auto`: the template's, hermes where it shows none. Raises
    IsobitError."""
    if name in FORMATS:
        return FORMATS[name]
    if name != "auto":
        raise IsobitError(f"--tool-format {name}: {did_you_mean(name, ['auto', *FORMATS])}")
    text = template or ""
    return FORMATS[next((found for shown, found in _SHOWN if shown in text), "hermes")]
