"""Rotary position embedding: inverse frequencies and cosine/sine tables; default, linear, llama3
and yarn scaling.

Frequencies and angles are float64, tables float32. Formulas: Su et al. 2021 (default), Chen et al.
2023 (linear), Meta's Llama 3.1 release (llama3), Peng et al. 2023, arXiv 2309.00071 (yarn). Left
out: dynamic NTK and longrope.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from isobit.errors import IsobitError

KINDS = ("default", "linear", "llama3", "yarn")
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
}  # null: left out
_SOME_DIM = 64  # of a head, on which it does not depend whether there are angles
_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_BETA = "llama_4_scaling_beta"


@dataclass(frozen=True)
class Rope:
    """Base `theta`, the `kind` of scaling, and its parameters under their Hugging Face names."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: tuple[tuple[str, float | bool], ...] = field(default=())

    @staticmethod
    def from_hf(
        values: Mapping[str, Any],
        where: str,
        *,
        theta: float,
        max_positions: int,
        partial: float = 1.0,
        more: tuple[str, ...] = (),
    ) -> "Rope":
        """From `rope_theta` and `rope_scaling`, or from the `rope_parameters` of transformers 5.

        `theta`, `max_positions` and `partial`, the part of a head that is rotated, are the family's
        own where config.json has none; where a family rotates whole heads, another part is refused;
        `more` are parameters that the family needs beside those of the kind.
        IsobitError for a kind that is not supported, a parameter that is missing or no number, and
        for two sections that say different things.
        """
        read = []
        for key in ("rope_scaling", "rope_parameters"):
            section = values.get(key)
            if section is not None and not isinstance(section, dict):
                raise IsobitError(
                    f"{where}: {key} has the wrong type: expected an object, got {section!r:.80}"
                )
            if section:
                read.append(_read(section, values, where, theta, max_positions, partial, more))
        if len(read) == 2 and read[0] != read[1]:
            raise IsobitError(
                f"{where}: rope_scaling and rope_parameters say different things; keep one of them"
            )
        return read[0] if read else _read({}, values, where, theta, max_positions, partial, more)

    @staticmethod
    def of(theta: float, partial: float) -> "Rope":
        """One without scaling, of a `partial` of each head."""
        return Rope(theta, "default", () if partial == 1.0 else ((_PARTIAL, partial),))

    def to_hf(self, scaled: bool = False, partial: float = 1.0) -> dict[str, Any]:
        """`scaled`: with a section also where there is no scaling, since one that is left out would
        be another; and with the part of a head that is rotated, where one that is left out would be
        `partial`."""
        values: dict[str, Any] = {"rope_theta": self.theta}
        if self.kind != "default" or scaled or partial != 1.0:
            own = {_PARTIAL: 1.0} if partial != 1.0 else {}
            values["rope_scaling"] = {"rope_type": self.kind, **own, **dict(self.parameters)}
        return values

    def section(self) -> dict[str, Any]:
        """One of the `rope_parameters` of transformers 5."""
        return {"rope_type": self.kind, "rope_theta": self.theta, **dict(self.parameters)}

    def tables(self, num_positions: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), float32 [positions, head_dim / 2], times the attention factor of yarn.
        Columns after those of the `rotated` dimensions leave what they are applied to as it is."""
        inverse, factor = self._frequencies(self.rotated(head_dim))
        angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * inverse.unsqueeze(
            0
        )
        rest = head_dim // 2 - inverse.shape[0]
        cos, sin = (torch.cos(angles) * factor).float(), (torch.sin(angles) * factor).float()
        return functional.pad(cos, (0, rest), value=1.0), functional.pad(sin, (0, rest))

    def rotated(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated, its first ones."""
        return int(head_dim * dict(self.parameters).get(_PARTIAL, 1.0))

    def of_part(self, rotated: int, head_dim: int) -> "Rope":
        """The same where a head of `head_dim` has so many rotated dimensions, and a config.json
        speaks of these alone (multi-head latent attention)."""
        part = (_PARTIAL, (rotated + 0.5) / head_dim)  # rounded down to `rotated`
        return replace(self, parameters=tuple(sorted((*self.whole.parameters, part))))

    @property
    def whole(self) -> "Rope":
        """The same without a part: the inverse of `of_part`."""
        rest = tuple(each for each in self.parameters if each[0] != _PARTIAL)
        return replace(self, parameters=rest)

    @property
    def score_factor(self) -> float:
        """What DeepSeek's YaRN multiplies scores by besides: the square of 0.1 · mscale_all_dim ·
        ln(factor) + 1."""
        parameters = dict(self.parameters)
        mscale, factor = parameters.get("mscale_all_dim"), parameters.get("factor", 1.0)
        return _mscale(factor, mscale) ** 2 if mscale and self.kind == "yarn" else 1.0

    def growth(self, num_positions: int) -> Tensor | None:
        """What queries are multiplied by at each position, float32 [positions, 1, 1]: 1 + β ·
        ln(1 + floor(position / original length)), as Llama 4 and Ministral 3 have it; None where
        the family has no β, or all of these are 1."""
        parameters = dict(self.parameters)
        if _BETA not in parameters or num_positions <= parameters[_ORIGINAL]:
            return None
        blocks = torch.arange(num_positions, dtype=torch.float64) // parameters[_ORIGINAL]
        logs = [math.log1p(block) for block in range(int(blocks[-1]) + 1)]
        table = 1 + parameters[_BETA] * torch.tensor(logs, dtype=torch.float64)
        return table[blocks.long()].float().view(-1, 1, 1)

    def _frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        inverse = self.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        parameters = dict(self.parameters)
        if self.kind == "linear":
            return inverse / parameters["factor"], 1.0
        if self.kind == "llama3":
            return _llama3(inverse, parameters), 1.0
        if self.kind == "yarn":
            return _yarn(inverse, parameters, self.theta, head_dim)
        return inverse, 1.0


_LONGROPE = (
    "; longrope turns a whole sequence by other angles once it is longer than the original context, "
    "so its first tokens would have other log-probabilities then than when they were sampled"
)


class Table(NamedTuple):
    """Cosines and sines [positions, head_dim / 2] of a rotary embedding, and its `growth`."""

    cos: Tensor
    sin: Tensor
    growth: Tensor | None


Tables = dict[Rope | None, Table]
"""Of each rotary embedding that a model has; None is that of layers without one, by which rotation
leaves every element as it is."""


def make_tables(
    ropes: Iterable[Rope | None], num_positions: int, head_dim: int, device: torch.device
) -> Tables:
    """The tables of these, on a device."""
    found: Tables = {}
    for rope in ropes:
        shape = num_positions, head_dim // 2
        cos, sin = (
            (torch.ones(shape), torch.zeros(shape))
            if rope is None
            else rope.tables(num_positions, head_dim)
        )
        growth = None if rope is None else rope.growth(num_positions)
        found[rope] = Table(
            cos.to(device), sin.to(device), None if growth is None else growth.to(device)
        )
    return found


def _read(
    section: Mapping[str, Any],
    values: Mapping[str, Any],
    where: str,
    theta: float,
    max_positions: int,
    rotated: float,
    more: tuple[str, ...],
) -> Rope:
    """One section. `original_max_position_embeddings` beside it counts more than the one inside,
    else the context."""
    kind = section.get("rope_type", section.get("type", "default"))
    if kind not in KINDS:
        raise IsobitError(
            f"{where}: unsupported rope scaling {kind!r:.80}: supported are {', '.join(KINDS)}"
            f"{_LONGROPE if kind in ('longrope', 'su') else ''}"
        )
    if any(isinstance(value, dict) for value in section.values()):
        raise IsobitError(
            f"{where}: rope_parameters of each layer type are not supported: all layers must "
            "share one set"
        )
    outside = values.get(_PARTIAL)
    partial = section.get(_PARTIAL, rotated if outside is None else outside)
    if partial != 1.0 and rotated == 1.0:
        raise IsobitError(
            f"{where}: partial rotary embedding is not supported ({_PARTIAL} {partial!r:.80})"
        )
    if not isinstance(partial, (int, float)) or isinstance(partial, bool) or not 0 < partial <= 1:
        raise IsobitError(
            f"{where}: {_PARTIAL} must be a number above 0, and at most 1, got {partial!r:.80}"
        )
    base = _number({"rope_theta": theta, **values, **section}, "rope_theta", where)
    if base <= 1:
        raise IsobitError(f"{where}: rope_theta must be above 1, got {base}")
    own = {
        _ORIGINAL: max_positions,
        **section,
        **{key: values[key] for key in values if key == _ORIGINAL},
    }
    given: dict[str, float | bool] = {} if partial == 1.0 else {_PARTIAL: partial}
    given |= _parameters(own, kind, where, max_positions, more)
    made = Rope(float(base), kind, tuple(sorted(given.items())))
    try:
        usable = bool(torch.isfinite(torch.cat(made.tables(2, _SOME_DIM))).all())
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


def _parameters(
    own: Mapping[str, Any], kind: str, where: str, max_positions: int, more: tuple[str, ...]
) -> dict[str, float | bool]:
    """Those of a kind of scaling, and `more`."""
    given: dict[str, float | bool] = {}
    for key in _NEEDED[kind]:
        if key not in own:
            raise IsobitError(f"{where}: rope scaling {kind} needs {key}")
        ratio = kind == "yarn" and key == "factor" and own[key] is None
        taken = _ORIGINAL if ratio else key
        found = _number(own, taken, where)
        if found <= 0:
            raise IsobitError(f"{where}: rope scaling {kind}: {taken} must be above 0, got {found}")
        given[key] = max_positions / found if ratio else found
    for key in _OPTIONAL.get(kind, ()):
        if own.get(key) is not None:
            given[key] = _number(own, key, where)
    for key in more:
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
