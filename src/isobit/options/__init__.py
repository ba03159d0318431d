"""Options: declared once, as fields of the frozen dataclass that the code runs with.

    @dataclass(frozen=True)
    class Clip:
        low: Annotated[float, above(0), at_most(1), "lower bound of the ratio"] = 0.2
        name: Internal[str] = ""

The field carries its type, its range, its default and what it means. From it come the value and the messages when a
file is read (`reading.py`), the reference of keys, and what a tab completes. A field that is `Internal` is no option:
the code sets it. Consistency of several fields is checked in `__post_init__`, which raises IsobitError.
"""

from isobit.options.declare import (
    REQUIRED,
    Before,
    Form,
    Internal,
    Limit,
    OneOf,
    Option,
    Such,
    Suggested,
    above,
    at_least,
    at_most,
    below,
    choices,
    members,
    options_of,
    plain,
    sections,
    text_as,
    type_text,
)
from isobit.options.reading import Expected, OptionError, UnknownOption, read

__all__ = [
    "REQUIRED",
    "Before",
    "Expected",
    "Form",
    "Internal",
    "Limit",
    "OneOf",
    "Option",
    "OptionError",
    "Such",
    "Suggested",
    "UnknownOption",
    "above",
    "at_least",
    "at_most",
    "below",
    "choices",
    "members",
    "options_of",
    "plain",
    "read",
    "sections",
    "text_as",
    "type_text",
]
