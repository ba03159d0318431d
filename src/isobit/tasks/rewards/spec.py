"""The reward functions of a run: `RewardSpec`, and its form on a command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from isobit.options.declare import FileName, above
from isobit.options.reading import OptionError
from isobit.tasks.rewards import named
from isobit.tasks.rewards.by_name import parse_reference, reference

OBJECT = "<python>:"
"""The beginning of the name of a reward function, or of rows, given to a run as a Python object."""


@dataclass(frozen=True)
class RewardSpec:
    """A reward function: a built-in one, or your own with TRL's signature."""

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
        """The name in metrics: the given name, else the function's."""
        return self.name if self.name is not None else self.function.rpartition(":")[2]

    @property
    def is_object(self) -> bool:
        """Whether the function is an object of this process, which workers cannot import."""
        return self.function.startswith(OBJECT)

    @property
    def by_name(self) -> bool:
        """Whether the function is a bare name, right or wrong, of `isobit.tasks.rewards.named`."""
        return self.function.isidentifier()

    @property
    def reference(self) -> str:
        """The function, or the name and its options, as a worker loads it."""
        return reference(self.function, self.options)

    def build(self, deadline_s: float) -> named.NamedReward | None:
        """Build the reward for a name; return None for a function. `deadline_s`: seconds, used
        unless the spec has its own. Raises OptionError."""
        if self.by_name:
            return named.build(self.function, self.options, self.deadline_s or deadline_s)
        if self.options and self.is_object:
            raise OptionError(
                ("options",), "an object of Python takes none; give functools.partial of it"
            )
        return None


def reward_section(value: Any) -> Any:
    """Return the section that a text stands for: a function or a name, also with options,
    `name:{"option": value}`. Raises IsobitError if the options are not JSON."""
    if not isinstance(value, str):
        return value
    name, options = parse_reference(value)
    return {"function": name, **({"options": options} if options else {})}
