"""What a run's config meant in the version that began it, where the same words mean something else now.

A run is resumed, evaluated and replayed under what it was begun with. `machine.json` says which facts a version
recorded, and so how old the run is. Left out: what cannot be computed any more, which opening the run refuses.
"""

from collections.abc import Mapping
from typing import Any

from isobit.options.consistency import TDP32, default_order


def as_begun(values: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config, in today's words; `facts` are those of its `machine.json`, empty if it never began.

    Before orders of sums were recorded, `consistency: bitwise` had the sums of `exact`; which of its two orders it has
    depends on the processor, and a run goes on with the one that it began with. Before formats were recorded, `fp8` and
    `mxfp8` cached keys and values as E4M3. Before prompts were shared, each completion had its own. Raises IsobitError
    for a precision that cannot be read.
    """
    found = dict(values)
    _keep_order(found, facts)
    if facts and "formats" not in facts:
        _cache_e4m3(found)
    if facts and (optimizer := found.get("optimizer")) is not None:
        found["optimizer"] = {"share_prompts": False, **optimizer}
    return found


def sft_as_begun(values: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The config of `isobit sft` that a run names as `model.sft`, as it made the run's base model. It has no facts of
    its own, so `facts` are the run's. Raises IsobitError as `as_begun`."""
    found = dict(values)
    _keep_order(found, facts)
    if facts and "formats" not in facts:
        _cache_e4m3(found)
    return found


def _keep_order(values: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Of sums, in a config that names none, on a CPU; before there were two it was tdp32."""
    named = values.get("backend", "auto")
    on_a_cpu = (facts.get("backend") if named == "auto" else named) in ("native", "reference")
    if not facts or not on_a_cpu or values.get("consistency", "bitwise") != "bitwise":
        return
    if "order" not in facts:
        values["consistency"] = "exact"
    elif (began := facts.get("bitwise", TDP32)) != default_order():
        values["consistency"] = f"bitwise-{began}"


def _cache_e4m3(values: dict[str, Any]) -> None:
    """Of the policy, of the reference model and of reward models: each names a precision of its own."""
    from isobit.precision.options import with_e4m3_cache  # here, so that --help does not import torch

    values["precision"] = with_e4m3_cache(values.get("precision", "fp8"))
    if (reference := values.get("reference")) and reference.get("precision") is not None:
        values["reference"] = {**reference, "precision": with_e4m3_cache(reference["precision"])}
    if (rewards := values.get("rewards")) and rewards.get("models"):
        models = [{**model, "precision": with_e4m3_cache(model.get("precision", "fp8"))} for model in rewards["models"]]
        values["rewards"] = {**rewards, "models": models}
