"""Rotary position embedding: inverse frequencies and cosine/sine tables; default, linear, llama3,
yarn and longrope scaling, and proportional, Gemma 4's: of all dimensions, as pairs of the two
halves, the first part turn by the angles that they have where all turn, and the others do not.

Frequencies and angles are float64, tables float32. Formulas: Su et al. 2021 (default), Chen et al.
2023 (linear), Meta's Llama 3.1 release (llama3), Peng et al. 2023, arXiv 2309.00071 (yarn), Ding et
al. 2024, arXiv 2402.13753 (longrope).

longrope has two lists of factors, short and long. Which one divides the frequencies is decided by
the model's context (max_position_embeddings), once for all of its sequences: long where it is above
the original length. transformers decides by the longest sequence of each forward, which would turn
a token by other angles once others in its batch, or later ones, are farther on; vLLM decides by
max_model_len. Left out: dynamic NTK.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from isobit.errors import IsobitError

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
PROPORTIONAL = "proportional"
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    PROPORTIONAL: (),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("attention_factor", "factor"),
    PROPORTIONAL: ("factor",),
}  # null: left out
_LISTS = ("short_factor", "long_factor")
_SOME_DIM = 64  # of a head, on which it does not depend whether there are angles
_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_BETA = "llama_4_scaling_beta"


@dataclass(frozen=True)
class Rope:
    """Base `theta`, the `kind` of scaling, and its parameters under their Hugging Face names."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = field(default=())

    @staticmethod
    def from_hf(
        values: Mapping[str, Any],
        where: str,
        *,
        theta: float,
        max_positions: int,
        partial: float | None = None,
        original: int | None = None,
        more: tuple[str, ...] = (),
        kinds: tuple[str, ...] = KINDS,
    ) -> "Rope":
        """Read it from `rope_theta` and `rope_scaling`, or from the `rope_parameters` of
        transformers 5.

        `theta`, `max_positions` and `partial`, the part of a head that is rotated, are the family's
        own where config.json has none; where a family rotates whole heads (None), another part is
        refused; `original` stands for an original length next to the section, which counts more than
        the one inside; `more` are parameters that the family needs next to those of the kind, and
        `kinds` those that it may have.
        IsobitError for a kind that is not supported, a parameter that is missing or no number, and
        for two sections that say different things.
        """
        read = []
        own = _Own(theta, max_positions, partial, original, more, kinds)
        for key in ("rope_scaling", "rope_parameters"):
            section = values.get(key)
            if section is not None and not isinstance(section, dict):
                raise IsobitError(
                    f"{where}: {key} has the wrong type: expected an object, got {section!r:.80}"
                )
            if section:
                read.append(_read(section, values, where, own))
        if len(read) == 2 and read[0] != read[1]:
            raise IsobitError(
                f"{where}: rope_scaling and rope_parameters say different things; keep one of them"
            )
        return read[0] if read else _read({}, values, where, own)

    @staticmethod
    def of(theta: float, partial: float) -> "Rope":
        """Return a rotary embedding without scaling, of a `partial` of each head."""
        return Rope(theta, "default", () if partial == 1.0 else ((_PARTIAL, partial),))

    def to_hf(self, scaled: bool = False, partial: float | None = None) -> dict[str, Any]:
        """Return the keys of config.json. `scaled`: with a section also where there is no scaling,
        since one that is left out would be another; and with the part of a head that is rotated,
        where one that is left out would be `partial`. longrope has the original length and the part
        next to its section, and the keys that transformers 4 takes in a Phi-3."""
        values: dict[str, Any] = {"rope_theta": self.theta}
        own: dict[str, Any] = {} if partial is None else {_PARTIAL: 1.0}
        own |= {key: list(v) if key in _LISTS else v for key, v in self.parameters}
        if self.kind == "longrope":
            values |= {key: own.pop(key) for key in (_ORIGINAL, _PARTIAL) if key in own}
            values["rope_scaling"] = {"type": self.kind, **own}
        elif self.kind != "default" or scaled or {partial, own.get(_PARTIAL, 1.0)} - {None, 1.0}:
            values["rope_scaling"] = {"rope_type": self.kind, **own}
        return values

    def section(self) -> dict[str, Any]:
        """Return one of the `rope_parameters` of transformers 5."""
        return {"rope_type": self.kind, "rope_theta": self.theta, **dict(self.parameters)}

    def tables(self, num_positions: int, head_dim: int, context: int = 0) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), float32 [positions, head_dim / 2], times the attention factor of yarn
        and longrope, of a model of `context` tokens, on which longrope depends. Columns after those
        of the `rotated` dimensions change nothing."""
        inverse, factor = self._frequencies(self.rotated(head_dim), context)
        angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * inverse.unsqueeze(
            0
        )
        rest = head_dim // 2 - inverse.shape[0]
        cos, sin = (torch.cos(angles) * factor).float(), (torch.sin(angles) * factor).float()
        return functional.pad(cos, (0, rest), value=1.0), functional.pad(sin, (0, rest))

    def rotated(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated, its first ones; of proportional all,
        most by angles of 0."""
        if self.kind == PROPORTIONAL:
            return head_dim
        return int(head_dim * dict(self.parameters).get(_PARTIAL, 1.0))

    def check(self, head_dim: int) -> None:
        """IsobitError unless heads of this width have the angles that the parameters are for."""
        rotated = self.rotated(head_dim)
        if rotated < 2 or rotated % 2:
            raise IsobitError(
                "config.json: rotary embedding needs an even part of a head, and "
                f"partial_rotary_factor leaves {rotated} of head_dim {head_dim}"
            )
        for key, value in self.parameters:
            if key in _LISTS and len(value) != rotated // 2:
                raise IsobitError(
                    f"config.json: rope scaling {self.kind}: {key} must have {rotated // 2} "
                    f"numbers, one for two of the {rotated} dimensions that are rotated, and has "
                    f"{len(value)}"
                )

    def of_part(self, rotated: int, head_dim: int) -> "Rope":
        """Return the same where a head of `head_dim` has this many rotated dimensions, and a
        config.json speaks of these alone (multi-head latent attention)."""
        part = (_PARTIAL, (rotated + 0.5) / head_dim)  # rounded down to `rotated`
        return replace(self, parameters=tuple(sorted((*self.whole.parameters, part))))

    @property
    def whole(self) -> "Rope":
        """The same without a part: the inverse of `of_part`."""
        rest = tuple(each for each in self.parameters if each[0] != _PARTIAL)
        return replace(self, parameters=rest)

    @property
    def score_factor(self) -> float:
        """DeepSeek's further YaRN factor of scores: the square of 0.1 · mscale_all_dim · ln(factor)
        + 1."""
        parameters = dict(self.parameters)
        mscale, factor = parameters.get("mscale_all_dim"), parameters.get("factor", 1.0)
        return _mscale(factor, mscale) ** 2 if mscale and self.kind == "yarn" else 1.0

    def growth(self, num_positions: int) -> Tensor | None:
        """Return what queries are multiplied by at each position, float32 [positions, 1, 1]: 1 + β
        · ln(1 + floor(position / original length)), as Llama 4 and Ministral 3 have it; None where
        the family has no β, or all of these are 1."""
        parameters = dict(self.parameters)
        if _BETA not in parameters or num_positions <= parameters[_ORIGINAL]:
            return None
        blocks = torch.arange(num_positions, dtype=torch.float64) // parameters[_ORIGINAL]
        logs = [math.log1p(block) for block in range(int(blocks[-1]) + 1)]
        table = 1 + parameters[_BETA] * torch.tensor(logs, dtype=torch.float64)
        return table[blocks.long()].float().view(-1, 1, 1)

    def is_long(self, context: int) -> bool:
        """Return whether a model of `context` tokens takes the long factors of longrope."""
        return self.kind == "longrope" and context > self.original_positions

    @property
    def original_positions(self) -> int:
        """The length that a scaling was made for; 0 where it has none."""
        return int(dict(self.parameters).get(_ORIGINAL, 0))

    def factor(self, context: int) -> float:
        """Return the factor of a scaling; longrope's default is that of the context."""
        given = dict(self.parameters).get("factor")
        return context / self.original_positions if given is None else float(given)

    def _frequencies(self, head_dim: int, context: int) -> tuple[Tensor, float]:
        inverse = self.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        parameters = dict(self.parameters)
        if self.kind == "linear":
            return inverse / parameters["factor"], 1.0
        if self.kind == PROPORTIONAL:
            turned = int(parameters.get(_PARTIAL, 1.0) * head_dim // 2)
            inverse[turned:] = 0.0
            return inverse / parameters.get("factor", 1.0), 1.0
        if self.kind == "llama3":
            return _llama3(inverse, parameters), 1.0
        if self.kind == "yarn":
            return _yarn(inverse, parameters, self.theta, head_dim)
        if self.kind == "longrope":
            divisors = parameters[_LISTS[self.is_long(context)]]
            attention = _longrope_attention(parameters, self.factor(context))
            return inverse / torch.tensor(divisors, dtype=torch.float64), attention
        return inverse, 1.0


class _Own(NamedTuple):
    """A family's own, as of `Rope.from_hf`."""

    theta: float
    max_positions: int
    partial: float | None
    original: int | None
    more: tuple[str, ...]
    kinds: tuple[str, ...]


class Table(NamedTuple):
    """Cosines and sines [positions, head_dim / 2] of a rotary embedding, and its `growth`."""

    cos: Tensor
    sin: Tensor
    growth: Tensor | None


Turned = tuple[Rope | None, int]
"""A rotary embedding and the width of the heads that it turns; None is that of layers without one,
by which rotation leaves every element as it is."""
Tables = dict[Turned, Table]
"""Of each that a model has."""


def make_tables(
    ropes: Iterable[Turned], num_positions: int, context: int, device: torch.device
) -> Tables:
    """Return the tables of these, on a device; `context` as of `Rope.tables`."""
    found: Tables = {}
    for rope, head_dim in ropes:
        shape = num_positions, head_dim // 2
        cos, sin = (
            (torch.ones(shape), torch.zeros(shape))
            if rope is None
            else rope.tables(num_positions, head_dim, context)
        )
        growth = None if rope is None else rope.growth(num_positions)
        found[rope, head_dim] = Table(
            cos.to(device), sin.to(device), None if growth is None else growth.to(device)
        )
    return found


def _read(section: Mapping[str, Any], values: Mapping[str, Any], where: str, family: _Own) -> Rope:
    """Return one section. `original_max_position_embeddings` next to it counts more than the one
    inside, else the context."""
    kind = section.get("rope_type", section.get("type", "default"))
    if kind not in family.kinds:
        old = "; su is the old name of longrope: give that" if kind == "su" else ""
        raise IsobitError(
            f"{where}: unsupported rope scaling {kind!r:.80}: supported are "
            f"{', '.join(family.kinds)}{old}"
        )
    if any(isinstance(value, dict) for value in section.values()):
        raise IsobitError(
            f"{where}: rope_parameters of each layer type are not supported: all layers must "
            "share one set"
        )
    outside = values.get(_PARTIAL)
    rotated = 1.0 if family.partial is None else family.partial
    partial = section.get(_PARTIAL, rotated if outside is None else outside)
    if partial != 1.0 and family.partial is None and kind != PROPORTIONAL:
        raise IsobitError(
            f"{where}: partial rotary embedding is not supported ({_PARTIAL} {partial!r:.80})"
        )
    if not isinstance(partial, (int, float)) or isinstance(partial, bool) or not 0 < partial <= 1:
        raise IsobitError(
            f"{where}: {_PARTIAL} must be a number above 0, and at most 1, got {partial!r:.80}"
        )
    base = _number({"rope_theta": family.theta, **values, **section}, "rope_theta", where)
    if base <= 1:
        raise IsobitError(f"{where}: rope_theta must be above 1, got {base}")
    own = {
        _ORIGINAL: family.max_positions,
        **section,
        **({} if family.original is None else {_ORIGINAL: family.original}),
        **{key: values[key] for key in values if key == _ORIGINAL},
    }
    given: dict[str, Any] = {} if partial == 1.0 else {_PARTIAL: partial}
    given |= _parameters(own, kind, where, family)
    made = Rope(float(base), kind, tuple(sorted(given.items())))
    context = family.max_positions
    try:
        width = 2 * len(given[_LISTS[made.is_long(context)]]) if kind == "longrope" else _SOME_DIM
        inverse, factor = made._frequencies(width, context)
        usable = math.isfinite(factor) and bool(torch.isfinite(inverse).all())
    except (
        ArithmeticError,
        ValueError,
        RuntimeError,
    ):  # out of the range of floats, or of logarithms
        usable = False
    if not usable:
        raise IsobitError(
            f"{where}: rope scaling {kind} has no angles with these parameters: {given!s:.200}"
        )
    return made


def _parameters(own: Mapping[str, Any], kind: str, where: str, family: _Own) -> dict[str, Any]:
    """Return the parameters of a kind of scaling, and the family's own."""
    given: dict[str, Any] = {}
    for key in _NEEDED[kind]:
        if key not in own:
            raise IsobitError(f"{where}: rope scaling {kind} needs {key}")
        ratio = kind == "yarn" and key == "factor" and own[key] is None
        taken = _ORIGINAL if ratio else key
        found = _number(own, taken, where)
        if found <= 0:
            raise IsobitError(f"{where}: rope scaling {kind}: {taken} must be above 0, got {found}")
        given[key] = family.max_positions / found if ratio else found
    for key in _OPTIONAL.get(kind, ()):
        if own.get(key) is not None:
            given[key] = _number(own, key, where)
    if kind == "longrope":
        given |= {key: _factors(own, key, where) for key in _LISTS}
    for key in family.more:
        if own.get(key) is None:
            raise IsobitError(f"{where}: rope scaling {kind} needs {key} in this architecture")
        given[key] = _number(own, key, where)
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise IsobitError(
            f"{where}: rope scaling llama3: high_freq_factor must be above low_freq_factor"
        )
    if kind == "yarn" and "truncate" in own:
        given["truncate"] = bool(own["truncate"])
    return given


def _factors(own: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
    """Return a list of longrope's. How many there must be, `Rope.check` says."""
    found = own.get(key)
    if not isinstance(found, list) or not found:
        raise IsobitError(f"{where}: rope scaling longrope needs {key}, a list of numbers above 0")
    factors = tuple(_number({key: factor}, key, where) for factor in found)
    if min(factors) <= 0:
        raise IsobitError(
            f"{where}: rope scaling longrope: the numbers of {key} must be above 0, got "
            f"{min(factors)}"
        )
    return factors


def _longrope_attention(parameters: Mapping[str, Any], factor: float) -> float:
    """Return what cosines and sines are multiplied by: sqrt(1 + ln(factor) / ln(original
    length))."""
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])
    original = parameters[_ORIGINAL]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _number(values: Mapping[str, Any], key: str, where: str) -> float:
    value = values[key]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise IsobitError(f"{where}: {key} must be a number, got {value!r:.80}")
    return value


def _llama3(inverse: Tensor, parameters: Mapping[str, float]) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between."""
    factor, low, high = (parameters[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, blended)
    return torch.where(wavelength < original / high, inverse, scaled)


def _yarn(
    inverse: Tensor, parameters: Mapping[str, Any], theta: float, head_dim: int
) -> tuple[Tensor, float]:
    """Interpolated frequencies for dimensions that turn rarely, kept ones for those that turn
    often; and sqrt(1/t)."""
    factor = parameters["factor"]
    original = parameters["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (
        (torch.arange(head_dim // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)
    ).clamp(0, 1)
    scaled = inverse / factor * ramp + inverse * (1 - ramp)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_attention(
            factor, parameters.get("mscale"), parameters.get("mscale_all_dim")
        )
    return scaled, float(attention_factor)


def _yarn_attention(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1)


def _mscale(factor: float, m: float) -> float:
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
