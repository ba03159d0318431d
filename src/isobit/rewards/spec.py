"""Which reward functions a run has: `RewardSpec`, and how a command line writes one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from isobit.options.declare import FileName, above
from isobit.options.reading import OptionError
from isobit.rewards import named
from isobit.rewards.by_name import parse_reference, reference

OBJECT = "<python>:"
"""Begins the name of what a run was given as an object of Python: a reward function, or rows."""


@dataclass(frozen=True)
class RewardSpec:
    """One reward function: a built-in one, or your own with TRL's signature."""

    function: Annotated[
        str,
        FileName(functions=True),
        "math, exact_match, fuzzy_match, format, length_penalty or code; or "
        "path/to/file.py:function or package.module:function",
    ]
    weight: Annotated[float, "what its reward is multiplied by in the sum of rewards"] = 1.0
    name: Annotated[str | None, "name in the metrics; default: the function's"] = None
    options: Annotated[
        Mapping[str, Any],
        "options of a built-in reward (how-to/rewards.md lists them), or values for parameters "
        "of your own function",
    ] = field(default_factory=dict)
    deadline_s: Annotated[
        float | None, above(0), "seconds for one call; default: rewards.deadline_s"
    ] = None

    @property
    def label(self) -> str:
        """The name in metrics: the given one, else the function's."""
        return self.name if self.name is not None else self.function.rpartition(":")[2]

    @property
    def is_object(self) -> bool:
        """Whether it is an object of this process, which no worker can import."""
        return self.function.startswith(OBJECT)

    @property
    def by_name(self) -> bool:
        """Whether it is meant as one of `isobit.rewards.named`: a bare name, right or wrong."""
        return self.function.isidentifier()

    @property
    def reference(self) -> str:
        """The function, or the name and its options, as a worker loads it."""
        return reference(self.function, self.options)

    def build(self, deadline_s: float) -> named.NamedReward | None:
        """The reward by name, or None for a function; `deadline_s` counts unless it has its own.
        Raises OptionError."""
        if self.by_name:
            return named.build(self.function, self.options, self.deadline_s or deadline_s)
        if self.options and self.is_object:
            raise OptionError(
                ("options",), "an object of Python takes none; give functools.partial of it"
            )
        return None


def parse_reward(text: str) -> RewardSpec:
    """The reward of a command line: a function or a name, also with options, `name:{"option":
    value}`.

    Raises IsobitError if the options are no JSON.
    """
    name, options = parse_reference(text)
    return RewardSpec(name, options=options)
