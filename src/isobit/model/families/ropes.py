"""Rotary embeddings of families in which layers with a window have their own, by the keys of
transformers 4 and 5."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families.rope import KINDS, PROPORTIONAL, Rope

_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RopeKinds:
    """`read` gives them from config.json, its name and the context, that of layers without a window
    first, and `write` the keys."""

    read: Callable[[Mapping[str, Any], str, int], tuple[Rope, Rope]]
    write: Callable[[Rope, Rope], dict[str, Any]]


def by_layer_type(theta: float, sliding_theta: float, sliding_key: str | None = None) -> RopeKinds:
    """Return one section each in rope_parameters; or rope_theta and rope_scaling for layers without
    a window alone. These thetas stand for what is left out; `sliding_key` names that of the others
    next to rope_theta, None if nothing does."""

    def read(values: Mapping[str, Any], where: str, max_positions: int) -> tuple[Rope, Rope]:
        sections = values.get("rope_parameters")
        given = [{key: v for key, v in values.items() if not key.startswith("rope_")}] * 2
        if not sections:
            if (
                sliding_key is None and values.get("rope_theta", theta) != theta
            ):  # transformers tells the first alone
                raise IsobitError(
                    f"{where}: rope_theta other than {theta}: give rope_parameters of each "
                    "layer type"
                )
            other = (
                {}
                if sliding_key is None
                else {"rope_theta": values.get(sliding_key, sliding_theta)}
            )
            given = [dict(values), {**given[1], **other}]
        elif not isinstance(sections, dict) or not all(
            isinstance(sections.get(kind), dict) for kind in _KINDS
        ):
            raise IsobitError(
                f"{where}: rope_parameters must have the sections {' and '.join(_KINDS)}"
            )
        elif values.get("rope_scaling") or "rope_theta" in values or sliding_key in values:
            raise IsobitError(
                f"{where}: rope_scaling or rope_theta stand beside rope_parameters; keep the latter"
            )
        else:
            given = [
                {**rest, "rope_parameters": sections[kind]} for rest, kind in zip(given, _KINDS)
            ]
        full, sliding = (
            Rope.from_hf(one, where, theta=own, max_positions=max_positions)
            for one, own in zip(given, (theta, sliding_theta))
        )
        return _checked(full, sliding, where)

    def write(full: Rope, sliding: Rope) -> dict[str, Any]:
        if (
            sliding_key is not None and sliding.kind == "default"
        ):  # in keys that transformers 4 knows too
            return {**full.to_hf(), sliding_key: sliding.theta}
        if sliding == Rope(sliding_theta) and full.theta == theta:
            return full.to_hf()
        return {
            "rope_parameters": {kind: rope.section() for kind, rope in zip(_KINDS, (full, sliding))}
        }

    return RopeKinds(read, write)


def by_sections(full: Rope, sliding: Rope) -> RopeKinds:
    """Return one section each in rope_parameters, with a theta, and no keys next to it; these where
    it is left out."""

    def read(values: Mapping[str, Any], where: str, max_positions: int) -> tuple[Rope, Rope]:
        if beside := [key for key in ("rope_theta", "rope_scaling") if values.get(key) is not None]:
            raise IsobitError(
                f"{where}: {beside[0]} is not read in this architecture; give rope_parameters of "
                "each layer type"
            )
        sections = values.get("rope_parameters")
        if sections is None:
            return full, sliding
        if not isinstance(sections, dict) or not all(
            isinstance(sections.get(kind), dict) and "rope_theta" in sections[kind]
            for kind in _KINDS
        ):
            raise IsobitError(
                f"{where}: rope_parameters must have the sections {' and '.join(_KINDS)}, each "
                "with a rope_theta"
            )
        first, second = (
            Rope.from_hf(
                {"rope_parameters": sections[kind]},
                where,
                theta=own.theta,
                max_positions=max_positions,
                kinds=(*KINDS, PROPORTIONAL),
            )
            for kind, own in zip(_KINDS, (full, sliding))
        )
        return _checked(first, second, where)

    def write(full: Rope, sliding: Rope) -> dict[str, Any]:
        sections = {kind: rope.section() for kind, rope in zip(_KINDS, (full, sliding))}
        return {"rope_parameters": sections}

    return RopeKinds(read, write)


def _checked(full: Rope, sliding: Rope, where: str) -> tuple[Rope, Rope]:
    """Return the two. Raises IsobitError for scalings that transformers has not in such a model."""
    if "longrope" in (full.kind, sliding.kind):
        raise IsobitError(
            f"{where}: unsupported rope scaling 'longrope': no model whose layer types have "
            "rotary embeddings of their own has it"
        )
    if any(dict(rope.parameters).get("truncate") is False for rope in (full, sliding)):
        raise IsobitError(
            f"{where}: rope scaling yarn: truncate off is not supported where layer types "
            "have rotary embeddings "
            "of their own: transformers ignores it there, and truncates; leave it out"
        )
    return full, sliding
