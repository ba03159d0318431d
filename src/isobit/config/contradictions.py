"""What sections of a config contradict each other, refused with what to leave out. Left out: what
the whole of a config contradicts (`schema.py`)."""

from collections.abc import Sequence

from isobit.config.sections import AdapterConfig, ReferenceConfig, SamplingConfig
from isobit.errors import IsobitError
from isobit.options.reading import OptionError
from isobit.rl.algorithm.objective import LOSS_KINDS, OWN_RATIO, Objective
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.tasks.environments.settings import EnvironmentConfig

__all__ = [
    "MOST_OF_A_STEP",
    "check_adapter",
    "check_comparison",
    "check_filtered",
    "check_kl",
    "check_kto",
    "check_loss",
    "check_observations",
    "check_reference",
    "check_step",
]

MOST_OF_A_STEP = 1 << 22
"""Completions or examples of a step: more are a slip of the pen, which no machine would end."""
_OF_COMPARISONS = {"precision": "presets", "seed": "first_seed and seeds", "run.dir": "out"}


def check_observations(algorithm: Objective, environment: EnvironmentConfig) -> None:
    """Raise IsobitError where what an environment says is to be learned, and none says anything
    between two turns."""
    if algorithm.observation_coefficient == 0 or (environment.used and environment.max_turns > 1):
        return
    why = "ends with the first answer (max_turns: 1)" if environment.used else "is not there"
    raise IsobitError(
        "algorithm.observation_coefficient learns what an environment says behind an answer, and "
        f"the environment {why}: set environment.tools, factory or mcp and max_turns, or leave it out"
    )


def check_filtered(algorithm: Objective) -> None:
    """Raise IsobitError for what is of the whole vocabulary, where sampling leaves some out."""
    if algorithm.kl_coefficient:
        raise IsobitError(
            "sampling.top_k, top_p, min_p and repetition_penalty cannot be used with a KL "
            "penalty: it has its own support; set algorithm.kl_coefficient: 0, or top_k: 0, "
            "top_p: 1, min_p: 0, repetition_penalty: 1"
        )
    if algorithm.weighs_places:
        raise IsobitError(
            "sampling.top_k, top_p, min_p and repetition_penalty cannot be used with "
            "algorithm.advantage: otb, which is of the whole vocabulary: set top_k: 0, top_p: 1, "
            "min_p: 0, repetition_penalty: 1, or another advantage"
        )


def check_adapter(adapter: AdapterConfig | None, optimizer: OptimizerSettings) -> None:
    """Raise IsobitError for an optimizer that has nothing to do in an adapter."""
    if adapter is not None and optimizer.name == "muon":
        raise IsobitError(
            "optimizer.name: muon is for whole matrices, and an adapter trains the two factors of "
            "each; set optimizer.name: adamw, or leave the adapter out"
        )


def check_kto(loss: str, batch_size: int, weights: tuple[float, float]) -> None:
    """Raise IsobitError where the weights of answers have no meaning, or KTO lacks what it needs."""
    if loss != "kto" and weights != (1, 1):
        raise IsobitError(
            f"desirable_weight and undesirable_weight are of loss: kto, and loss is {loss}: "
            "leave them out"
        )
    if loss == "kto" and (batch_size < 2 or not any(weights)):
        what = "batch_size of 2 or more: it estimates a KL from answers to other prompts"
        raise IsobitError(f"loss: kto needs a {what}, and a weight above 0")


def check_loss(algorithm: Objective) -> None:
    """Raise IsobitError where a part of the objective has no meaning beside its loss or advantage."""
    if algorithm.dual_clip is not None and algorithm.loss in {*LOSS_KINDS} - {"clip"}:
        raise IsobitError(
            f"algorithm.dual_clip bounds the clipped loss; {algorithm.loss} has no such "
            "clip: leave one of them out"
        )
    if algorithm.loss == "divergence" and not algorithm.distills:
        raise IsobitError(
            "algorithm.loss: divergence is from a teacher: set algorithm.advantage: distillation, "
            "or take another loss"
        )
    if algorithm.loss == "divergence" and algorithm.ratio != "token":
        raise IsobitError("algorithm.loss: divergence knows no ratio: leave algorithm.ratio out")
    of_divergence = (algorithm.divergence_beta, algorithm.divergence_top_k) != (1, 0)
    if of_divergence and algorithm.loss != "divergence":
        raise IsobitError(
            "algorithm.divergence_beta and divergence_top_k are of loss: divergence: set it, or "
            "leave them out"
        )
    if algorithm.advantage == "maxrl" and (algorithm.kl_in_reward or algorithm.overlong_buffer):
        raise IsobitError(
            "algorithm.advantage: maxrl needs rewards of 0 and more, which kl_in_reward and "
            "overlong_buffer can make less: leave one of them out"
        )
    if algorithm.loss in OWN_RATIO and algorithm.ratio != "token":
        raise IsobitError(
            f"algorithm.ratio: {algorithm.ratio} has no meaning under loss: {algorithm.loss}, which "
            "defines its ratio: leave one of them out"
        )


def check_reference(reference: ReferenceConfig, algorithm: Objective, adapted: bool) -> None:
    """Raise IsobitError for a teacher that is shown something and taught by nobody, a policy that
    would be compared with itself, or a reference that cannot follow a policy, of which an adapter
    is all that is trained where it is `adapted`."""
    if reference.shown is not None and not algorithm.distills:
        raise IsobitError(
            "reference.shown is for a teacher: set algorithm.advantage: distillation, or leave it out"
        )
    if reference.weights == "policy" and reference.shown is None:
        raise IsobitError(
            "reference.weights: policy has no distance to itself: say what it is shown as a teacher "
            "(reference.shown), or take the initial weights"
        )
    if reference.weights == "policy" and (reference.path or reference.precision):
        raise IsobitError(
            "reference.weights: policy is the policy itself: leave reference.path and precision out"
        )
    if not reference.follows:
        return
    if reference.weights == "policy" or reference.path is not None:
        key = "path: a model of its own" if reference.path else "weights: policy"
        raise IsobitError(
            f"reference.{key} does not follow the policy: leave it or reference.sync_every out"
        )
    if not algorithm.kl_coefficient:
        raise IsobitError(
            "reference.sync_every: nothing is compared with a reference: set "
            "algorithm.kl_coefficient, or leave it out"
        )
    if adapted and reference.precision is not None:
        raise IsobitError(
            "reference.precision: a reference that follows an adapter has the policy's own: leave "
            "it or reference.sync_every out"
        )


def check_kl(algorithm: Objective) -> None:
    """Raise IsobitError where a KL penalty has no effect, or its estimator no meaning."""
    if algorithm.kl_in_reward and not algorithm.kl_coefficient:
        raise IsobitError("algorithm.kl_in_reward needs a kl_coefficient above 0")
    if algorithm.estimator == "k1" and algorithm.kl_coefficient and not algorithm.kl_in_reward:
        raise IsobitError(
            "algorithm.kl_estimator k1 in the loss has a gradient of mean 0, which pulls nowhere: "
            "take k2 or k3, or charge it to the reward with kl_in_reward: true"
        )
    if algorithm.estimator == "k3-unbiased" and algorithm.kl_in_reward:
        raise IsobitError(
            "algorithm.kl_estimator k3-unbiased weighs the KL in the loss by the ratio, which a "
            "reward has not: take k1, k2 or k3, or leave kl_in_reward out"
        )


def check_step(prompts: int, sampling: SamplingConfig, algorithm: Objective) -> None:
    """Raise IsobitError for more completions of a step than anybody means, fewer than it has
    updates, and for a buffer as long as they are."""
    group = sampling.group_size
    if prompts * group > MOST_OF_A_STEP:
        raise IsobitError(
            f"prompts_per_step {prompts:,} x sampling.group_size {group:,} are {prompts * group:,} "
            f"completions in a step; give at most {MOST_OF_A_STEP:,}"
        )
    if algorithm.overlong_buffer >= sampling.max_new_tokens:
        raise IsobitError("algorithm.overlong_buffer must be below sampling.max_new_tokens")
    if algorithm.updates_per_batch > prompts * group:
        raise IsobitError("algorithm.updates_per_batch exceeds the completions of a step")


def check_comparison(presets: Sequence[str], changes: Sequence[str]) -> None:
    """Raise IsobitError for presets that are none, or twice there, and for changes of what a
    comparison sets for each run."""
    if not presets:
        raise OptionError(("presets",), "expected at least 1 of them")
    if len(set(presets)) < len(presets):
        raise OptionError(("presets",), "one of them is there twice")
    for change in changes:
        if (key := change.partition("=")[0]) in _OF_COMPARISONS:
            raise IsobitError(
                f"changes: {key}: a comparison sets it for each run, by {_OF_COMPARISONS[key]}"
            )
