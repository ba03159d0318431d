"""What a run computes with where its config leaves it open: what `auto`, the precision and the
model decide, the memory of the machine for `optimizer.micro_batch_tokens: auto`, and the data for
`epochs`.

It is computed once, when a run is opened, and passed to all code that needs a part of it.
`resolved.json` keeps it in the run directory, and a run that goes on must come to the same
(`keep`). Left out: what computes (`running/machine.py`), and what the config says itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar

from isobit.config import Config, SftConfig
from isobit.engine.engine import tokens_of_a_page
from isobit.errors import IsobitError, brief
from isobit.model import Model
from isobit.precision import Precision
from isobit.rl import ResolvedObjective, for_precision
from isobit.rl.algorithm.objective import shares_prompts
from isobit.rl.learner.agreement import promises_bits
from isobit.run.directory import RESOLVED, RunDirectory, object_in
from isobit.run.rows import MOST_STEPS

_Config = TypeVar("_Config", Config, SftConfig)


def in_steps(config: _Config, prompts: int) -> _Config:
    """Return the config with `steps` in place of `epochs` over this number of training prompts,
    rounded up; one without `epochs` is returned unchanged."""
    if config.epochs is None:
        return config
    steps = math.ceil(Fraction(str(config.epochs)) * prompts / config.prompts_per_step)
    if steps >= MOST_STEPS:
        raise IsobitError(
            f"epochs {config.epochs:g} of {prompts:,} prompts are {brief(steps)} steps; give less than "
            f"{MOST_STEPS:,} of them"
        )
    return replace(config, steps=steps, epochs=None)


@dataclass(frozen=True)
class Resolved:
    """`page_size`: tokens. `record_routes`: the engine records the experts that it chose.
    `share_prompts`: the learner computes the rows of a prompt once. `order`: of sums.
    `expects_equal_bits`: of rollout and learner."""

    objective: ResolvedObjective
    micro_batch_tokens: int
    share_prompts: bool
    record_routes: bool
    page_size: int
    order: str
    expects_equal_bits: bool

    def plain(self) -> dict[str, Any]:
        """Return the values of `resolved.json`."""
        objective = self.objective
        return {
            "correction": str(objective.rule),
            "recompute_old_logprobs": objective.recompute_old,
            "stale_samples": objective.stale_samples,
            "advantage": objective.advantage,
            "loss": objective.loss,
            "ratio": objective.ratio,
            "loss_aggregation": objective.loss_aggregation,
            "clip_low": objective.clip_low,
            "clip_high": objective.clip_high,
            "kl_estimator": objective.estimator if objective.kl_coefficient else None,
            "router_replay": objective.router_replay,
            "record_routes": self.record_routes,
            "micro_batch_tokens": self.micro_batch_tokens,
            "share_prompts": self.share_prompts,
            "page_size": self.page_size,
            "order": self.order,
            "expects_equal_bits": self.expects_equal_bits,
        }


def keep(values: Mapping[str, Any], run: RunDirectory) -> None:
    """Write what was resolved, in plain values, into the run that begins. Raises IsobitError where
    one that goes on began with something else; whether bits are promised may change with the
    machine."""
    recorded = object_in(run.directory / RESOLVED)
    if not recorded:
        run.write_object(RESOLVED, values)
        return
    for name in sorted(recorded.keys() & values.keys() - {"expects_equal_bits"}):
        if recorded[name] != values[name]:
            raise IsobitError(
                f"run {run.directory} began with {name} {recorded[name]} ({RESOLVED}), and here "
                "it would go on with "
                f"{values[name]}; resume it with the version of isobit that began it"
            )


def resolve(
    config: Config,
    model: Model,
    reward_weights: Sequence[tuple[str, float]] = (),
    *,
    learns_like_recorded: bool = True,
) -> Resolved:
    """Return the meaning of a config for a model. `learns_like_recorded`: nothing differs from the
    run whose rollouts this one learns from, if it samples none. `optimizer.micro_batch_tokens:
    auto` is 1 until it is known what fits."""
    objective = objective_of(config, model.precision, reward_weights)
    mixture, recurrent = model.config.routed is not None, model.config.linear is not None
    routes = mixture and (objective.recompute_old or objective.router_replay)
    if routes and config.environment.used and config.environment.history == "fork":
        raise IsobitError(
            "environment.history: fork does not record which experts served the contexts of an "
            "episode; set algorithm.router_replay: false and recompute_old_logprobs: never"
        )
    wanted, tokens = config.optimizer.share_prompts, config.optimizer.micro_batch_tokens
    return Resolved(
        objective,
        micro_batch_tokens=1 if tokens == "auto" else tokens,
        share_prompts=shares_prompts(wanted, objective, mixture=mixture, recurrent=recurrent),
        record_routes=routes,
        page_size=tokens_of_a_page(model.config, config.engine.page_size),
        order=model.ops.order,
        expects_equal_bits=promises_bits(model) and learns_like_recorded,
    )


def objective_of(
    config: Config, precision: Precision, reward_weights: Sequence[tuple[str, float]] = ()
) -> ResolvedObjective:
    """Return the config's algorithm, with `auto` resolved and what sampling and rewards decide."""
    sampling, partial = config.sampling, config.partial.used
    stale = bool(config.rollouts_ahead or config.replay.groups_per_step or partial)
    objective = for_precision(config.algorithm, precision, stale=stale)
    return replace(
        objective,
        max_new_tokens=config.most_sampled,
        temperature=sampling.temperature,
        filtering=sampling.filtering,
        reward_weights=tuple(reward_weights),
    )
