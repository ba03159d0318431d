"""Every metric that a run logs, in one place: its name, its meaning and the source of its
definition.

`python -m isobit.run.metrics` prints docs/metrics.md. A name that is not here cannot be logged.
Names that end in `*` stand for a family (one per reward function, per tool, per k, per value of a
tag, or per sign of the advantage).
"""

import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache

METRICS: dict[str, str] = {
    "step": "batches that were learned from, this one included",
    "reward/mean": "mean reward of the scored completions",
    "reward/std": "standard deviation of these rewards (over n - 1)",
    "reward/function/*": "mean of one reward function, unweighted",
    "reward/reference_kl": "mean KL to the reference that the reward of a completion loses, by "
    "kl_estimator",
    "accuracy/held_out": "greedy completions of the held-out split whose reward is at least 1, "
    "as a fraction",
    "reward/held_out": "mean reward of the greedy completions of the held-out split",
    "accuracy/pass_at_*": "pass@k on the held-out split, from samples: the chance that one of k "
    "is correct (unbiased)",
    "accuracy/majority_at_*": "maj@k on the held-out split: the chance that the answer of most "
    "of k samples is correct",
    "evaluation/stopped": "1 in the step whose evaluation ended the run (evaluation.stop_at, "
    "evaluation.patience)",
    "accuracy/tag/*": "accuracy/held_out of the prompts with one value of the tag",
    "loss/policy": "algorithm.loss, aggregated as the objective says; mean over the step's "
    "optimizer steps",
    "loss/kl": "estimate of KL(policy ‖ reference) per token; 0 without a reference",
    "loss/observation": "mean cross-entropy of the tokens that environments said, in nats, where "
    "these are learned (algorithm.observation_coefficient)",
    "loss/cross_entropy": "of a supervised run: mean cross-entropy of the step's trained tokens, in "
    "nats",
    "loss/held_out": "of a supervised run: mean cross-entropy of the held-out answers' trained "
    "tokens, in nats; of pairs their mean loss",
    "loss/dpo": "mean loss of the step's pairs, under loss: dpo",
    "loss/ipo": "mean loss of the step's pairs, under loss: ipo",
    "loss/kto": "mean loss of the step's answers, under loss: kto",
    "preference/chosen_reward": "mean over pairs of beta · (log policy - log reference) of the "
    "preferred answer (TRL's rewards/chosen); under loss: kto over desirable answers",
    "preference/rejected_reward": "the same of the other answer (rewards/rejected); under loss: kto "
    "over undesirable answers",
    "preference/margin": "mean of their difference (rewards/margins), or under loss: kto the "
    "difference of both; exactly 0 in the first step",
    "preference/kl": "under loss: kto the estimate of KL(policy ‖ reference), of prompts with the "
    "answers to others (kl); exactly 0 in the first step",
    "preference/accuracy": "pairs whose preferred answer has the larger reward "
    "(rewards/accuracies)",
    "preference/held_out_accuracy": "the same of the held-out pairs; under loss: kto answers that "
    "have moved to the side of their label, from the KL",
    "loss/*": "a metric of your own loss function: its mean over the trained tokens",
    "grad_norm": "global L2 norm of the gradient before clipping; mean over the step's "
    "optimizer steps",
    "learn/skipped_share": "prompt and completion tokens without a backward: micro-batches "
    "whose advantages are all 0",
    "learn/shared_share": "prompt and completion tokens whose rows were those of an earlier "
    "completion of the prompt",
    "learning_rate": "learning rate of this step",
    "entropy": "mean entropy of the policy's distribution per completion token that the learner "
    "computes, in nats",
    "entropy_coefficient": "weight of the entropy bonus in the loss of the next optimizer step, "
    "where there is one (algorithm.entropy_coefficient)",
    "clip_fraction": "completion tokens whose gradient the clip of the loss or the off-policy mask "
    "cuts off; none where the advantage is 0",
    "groups/zero_spread_fraction": "groups whose scored rewards are all equal: nothing to learn "
    "from",
    "advantage/nonzero_fraction": "samples learned from whose advantage is not 0; where it "
    "stays 0, nothing is learned",
    "groups/resampled": "groups dropped by dynamic sampling",
    "groups/unscored": "completions without a reward",
    "groups/unshown": "of a distillation: completions whose teacher was shown nothing, or more than "
    "its context takes (reference.shown); they are not learned from",
    "length/mean": "tokens per completion, the end-of-sequence token included",
    "length/truncated_fraction": "completions that ended at the length limit",
    "env/turns": "turns of the model in an episode with an environment, mean",
    "env/problems": "episodes whose environment raised, hung or died, as a fraction",
    "env/cached_tokens": "tokens of earlier turns and of prompts that were found in the prefix "
    "cache; depends on when tools answer",
    "env/preemptions": "sequences that gave their pages back and were recomputed; depends on when "
    "tools answer",
    "tools/call_frequency": "calls of tools that were carried out, per episode (TRL)",
    "tools/failure_frequency": "those of them that failed, as a fraction (TRL)",
    "tools/call_frequency/*": "tools/call_frequency of one tool; of `unknown`: names that no tool has",
    "tools/failure_frequency/*": "tools/failure_frequency of one tool",
    "mismatch/token_mult_prob_error": "mean over tokens of exp(|lr|) with lr = log learner - "
    "log rollout (NeMo RL)",
    "mismatch/kl_k3": "mean of exp(lr) - lr - 1, estimating KL(rollout ‖ learner) "
    "(gen_kl_error, k3_kl)",
    "mismatch/kl_k3_reverse": "mean of exp(-lr) + lr - 1, estimating KL(learner ‖ rollout) "
    "(policy_kl_error)",
    "mismatch/kl_k1": "mean of -lr: signed, so it shows a one-sided corruption (verl)",
    "mismatch/importance_ratio": "mean of exp(lr); 1 in the mean if only noise differs "
    "(sampling_importance_ratio)",
    "mismatch/chi2": "mean of exp(2 lr), minus 1 (verl's chi2_token)",
    "mismatch/js_divergence": "estimate of the Jensen-Shannon divergence (NeMo RL)",
    "mismatch/learner_ppl": "mean over sequences of exp(-mean log π_learner) (verl's training_ppl)",
    "mismatch/rollout_ppl": "mean over sequences of exp(-mean log π_rollout) (verl)",
    "mismatch/log_ppl_diff": "mean over sequences of mean log π_rollout - mean log π_learner (verl)",
    "mismatch/ppl_ratio": "mean over sequences of exp of that difference (verl)",
    "mismatch/chi2_sequence": "mean over sequences of exp(2 Σ lr), minus 1 (verl's chi2_seq)",
    "mismatch/max_abs_logprob_diff": "largest |lr|",
    "mismatch/kl_k3_from_*": "mismatch/kl_k3 of the tokens n to 2n - 1 of their completions, "
    "counted from 1, for each power of two n; only where tokens differ",
    "mismatch/differing_tokens": "tokens whose two log-probabilities differ in any bit",
    "mismatch/corrected": "1 where tokens differed that must not, and were weighed; only under "
    "on_mismatch: correct",
    "mismatch/compared_tokens": "tokens compared: all, or those of the first optimizer step (the "
    "weights move on); of samples that the learner leaves out, mismatch.samples_of_zero_advantage; of "
    "batches sampled ahead of the learner, mismatch.share_ahead in the step that samples them",
    "mismatch/comparable_tokens": "tokens that could have been: of the weights of this step, "
    "learned from or sampled ahead",
    "correction/mean_weight": "mean importance weight",
    "correction/clipped_fraction": "tokens whose weight was truncated",
    "correction/rejected_fraction": "tokens that the correction left out",
    "correction/kept_fraction": "completions with a token that the correction kept",
    "correction/effective_step": "share of the step that a correction leaves: Σ weight · "
    "|advantage| with it, over the same sum without it",
    "correction/largest_ratio": "largest weight before truncation",
    "correction/effective_sample_size": "1 / mean((w / mean w)²) of the truncated weights (verl)",
    "correction/effective_sample_size_untruncated": "the same of the untruncated weights, where "
    "heavy tails show",
    "custom/*": "a number that one of the `measures` given to `train` returned",
    "steps/skipped": "optimizer steps skipped because a loss or a gradient was not finite",
    "adapter/update_norm": "Frobenius norm of alpha / rank · B·A over all matrices that have an "
    "adapter",
    "quant/weight_flushed_fraction": "non-zero weights of quantized layers that became 0 in the "
    "rollout's copy",
    "quant/weight_saturated_fraction": "weights clamped by their scale",
    "quant/weight_relative_error": "norm of the rollout's weights minus the masters, relative "
    "to the masters",
    "quant/activation_flushed_fraction": "non-zero elements of the learner's activations that "
    "became 0 in FP8, every run.quantization_every steps",
    "quant/activation_saturated_fraction": "activations clamped by their scale; in the same steps",
    "quant/activation_relative_error": "norm of the error of the quantized activations, "
    "relative; in the same steps",
    "quant/gradient_flushed_fraction": "non-zero elements of output gradients that became 0 in "
    "FP8; in the same steps",
    "quant/gradient_saturated_fraction": "elements of output gradients clamped by their scale; "
    "in the same steps",
    "quant/gradient_relative_error": "norm of the error of the quantized gradients, relative; "
    "in the same steps",
    "quant/kv_scale_k_mean": "calibrated scale of the keys, mean over layers",
    "quant/kv_scale_v_mean": "calibrated scale of the values, mean over layers",
    "quant/query_scale_mean": "calibrated scale of the queries, mean over layers",
    "quant/kv_scale_drift": "largest relative change of a calibrated scale since the last step",
    "quant/kv_saturated_fraction": "elements of keys and values that a calibrated scale clamped "
    "in the last rollout",
    "router/load_max_over_mean": "tokens of the busiest expert over those of the average one, "
    "mean over layers",
    "router/idle_fraction": "experts that served no token in the step's forwards",
    "router/auxiliary_loss": "load-balancing loss (Switch) over the step's forwards and all "
    "layers; k where balanced",
    "router/differing_choices": "share of the (token, layer) pairs for which the learner would "
    "choose other experts",
    "staleness/mean": "steps learned between the sampling of a completion and the learning from "
    "it, mean; of one that went on across updates, of its oldest token that is learned from",
    "staleness/max": "the largest of them",
    "staleness/kl_k3": "mismatch/kl_k3 of the tokens of older weights, which the mismatch "
    "metrics leave out",
    "staleness/token_mult_prob_error": "mismatch/token_mult_prob_error of the same samples",
    "partial/rounds": "rounds of at most partial.tokens_per_round tokens a completion that the step "
    "took",
    "partial/unfinished": "completions that the step left for the next one to go on with",
    "partial/cached_tokens": "tokens of prompts and of completions so far that were found in the "
    "prefix cache; depends on which rank goes on with a group",
    "partial/preemptions": "sequences that gave their pages back and were recomputed; depends on "
    "ranks too",
    "partial/completions_fraction": "of the completions that were learned from, those that several "
    "versions of the weights drew",
    "partial/versions_max": "the most versions that drew one of them",
    "partial/masked_fraction": "of their tokens, those older than partial.max_staleness, which no "
    "loss was on",
    "replay/groups": "groups of the step that were learned from before",
    "replay/buffer_groups": "groups kept for replay",
    "sync/bytes": "weights sent to the rollout's engine; 0 where it shares the learner's storage",
    "rollout/tokens": "tokens sampled",
    "rollout/prompt_tokens": "tokens of the prompts, each counted once; with `partial` also those of "
    "completions so far, in each round",
    "rollout/cached_tokens": "tokens of the prompts that were found in the prefix cache",
    "rollout/prefix_hit_fraction": "the same as a fraction",
    "rollout/preemptions": "sequences that gave their pages back and were recomputed",
    "spec_decode/num_drafts": "times that a sequence had drafts in a step "
    "(engine.num_speculative_tokens; this and the others are vLLM's)",
    "spec_decode/num_draft_tokens": "tokens that were drafted",
    "spec_decode/num_accepted_tokens": "drafted tokens that were what was sampled in their place",
    "spec_decode/draft_acceptance_rate": "the same as a fraction of those that were drafted",
    "spec_decode/mean_acceptance_length": "tokens that a step gives a sequence that has drafts: 1, "
    "and those of the drafts that count",
    "serve/requests": "requests of others that were answered during the step (serve.port)",
    "serve/tokens": "tokens sampled for them",
    "prompts/consumed": "data cursor: prompts taken from the data since the run began",
    "prompts/skipped": "prompts that the curriculum passed over before those of the step",
    "weights_version": "syncs of the working weights since the model was loaded",
    "time/sync": "seconds: requantizing the working weights, and sending and checking them with "
    "separate engines",
    "time/send": "seconds: giving the weights to the engines of a fleet",
    "time/calibrate": "seconds: calibrating the KV cache",
    "time/rollout": "seconds: sampling",
    "time/rollout_waited": "seconds after learning until a fleet had sampled and scored what it "
    "samples beside it",
    "time/tools": "seconds: tools that were called between turns, added up; most of them during the "
    "rollout, beside it and beside one another",
    "time/tools/*": "seconds of one tool, likewise",
    "time/score": "seconds: waiting for reward functions after the rollout, and reward models",
    "time/score_overlapped": "seconds of reward functions that ran during the rollout",
    "time/serve": "seconds: answering others' requests, most of them during the rollout and part "
    "of its time, and what other threads took for them, beside it",
    "time/learn": "seconds: forward, backward, optimizer",
    "time/compare": "seconds: comparing completions that were sampled ahead of the learner",
    "time/step": "seconds: the whole step, evaluation and checkpoint excluded",
    "throughput/rollout_tokens_per_s": "sampled tokens per second of sampling",
    "throughput/learn_tokens_per_s": "prompt and completion tokens per second of learning",
    "memory/peak_rss_mib": "largest resident memory of the process so far",
    "memory/peak_rollout_mib": "peak GPU memory of tensors during the step's rollout; on a GPU only",
    "memory/peak_learn_mib": "the same during forward, backward and optimizer",
    "memory/kv_cache_mib": "allocated for keys and values, scales included",
    "memory/optimizer_mib": "the optimizer's state (moments, momentum), in its storage format",
    "memory/reference_mib": "working weights of the frozen reference; it keeps no masters",
    "memory/reward_models_mib": "working weights of the reward models",
    "memory/weights_mib": "masters and all working weights; copies that a backend repacks for "
    "itself are not counted",
}
"""Name to definition. Fractions are from 0 to 1, times in seconds, memory in MiB, log-probabilities
in nats."""

SUPERVISED_LOSSES = ("loss/cross_entropy", "loss/dpo", "loss/ipo", "loss/kto")
"""The loss of a step of a supervised run, by its kind."""

TIMINGS = (
    "time/*",
    "throughput/*",
    "memory/peak_*",
    "serve/*",
    "env/cached_tokens",
    "env/preemptions",
    "spec_decode/*",  # after a resume less is known of what was sampled before
    "partial/cached_tokens",
    "partial/preemptions",
)
"""What differs between a run and its exact repetition."""

EVALUATED = tuple(
    name for name in METRICS if name.startswith(("accuracy/", "evaluation/")) or "/held_out" in name
)
"""What an evaluation adds to the row of its step. A step that is evaluated because it is the last
has other ones, or none, in a longer run."""


def check(metrics: Mapping[str, float]) -> None:
    """Assert that the name of every metric is defined."""
    unknown = [name for name in metrics if not _matches(name, tuple(METRICS))]
    assert not unknown, f"metrics without a definition: {unknown}"


def member(name: str) -> str:
    """Return a name from elsewhere, such as a tool's, as the last part of a metric's name."""
    return re.sub(r"[^\w.-]", "_", name)


def is_timing(name: str) -> bool:
    """Return whether a metric may differ between a run and its exact repetition."""
    return _matches(name, TIMINGS)


def of_an_evaluation(name: str) -> bool:
    """Return whether a metric is measured by an evaluation, and not by the step."""
    return _matches(name, EVALUATED)


@cache  # the same names come in every step
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def of_the_machine(name: str) -> bool:
    """Return whether a metric is a time or memory, which differ between machines and between
    numbers of ranks."""
    return is_timing(name) or name.startswith("memory/")


def plain(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics for JSON, which has no NaN: a value that is not finite becomes None (null)."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def markdown() -> str:
    """Return the text of docs/metrics.md."""
    rows = [
        f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |" for name, meaning in METRICS.items()
    ]
    head = (
        "# Metrics\n\nGenerated by `python -m isobit.run.metrics`; one object per step in "
        "`metrics.jsonl`.\n"
    )
    units = (
        "Fractions are from 0 to 1, times in seconds, memory in MiB, log-probabilities in "
        "nats; null is not finite.\n"
    )
    return "\n".join([head, units, "| name | meaning |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    print(markdown(), end="")
