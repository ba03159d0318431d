"""The charts of a report, by section. A chart whose metrics a run does not have is left out."""

from isobit.monitor.report.charts import Panel
from isobit.monitor.report.series import Series, points
from isobit.run.metrics import SUPERVISED_LOSSES

OUTCOME = (
    Panel(
        "Reward",
        ("reward/mean",),
        note="band: 95 % interval of the mean, over prompts, within the run's rewards",
    ),
    Panel(
        "Held-out accuracy",
        ("accuracy/held_out", "accuracy/pass_at_*", "accuracy/majority_at_*"),
        fraction=True,
    ),
    Panel(
        "KL in the reward",
        ("reward/reference_kl",),
        unit="nats per completion",
        note="to the reference, or to a teacher",
    ),
    Panel(
        "Loss",
        (*SUPERVISED_LOSSES, "loss/held_out"),
        note="of the answers of a step, and of the held-out ones; cross-entropy in nats per token",
    ),
    Panel(
        "Preferences",
        ("preference/accuracy", "preference/held_out_accuracy"),
        fraction=True,
        note="pairs whose preferred answer gained more",
    ),
    Panel(
        "Margin",
        ("preference/margin", "preference/chosen_reward", "preference/rejected_reward"),
        unit="nats",
        note="of the rewards that the policy implies",
    ),
    Panel("Completion length", ("length/mean",), unit="tokens"),
    Panel(
        "Truncated completions", ("length/truncated_fraction",), note="ended at the length limit"
    ),
)

LEARNING = (
    Panel("Reward functions", ("reward/function/*",), note="mean of each, unweighted"),
    Panel("Groups without spread", ("groups/zero_spread_fraction",), note="which teach nothing"),
    Panel(
        "Left out of learning",
        ("learn/skipped_share",),
        note="fraction of tokens: micro-batches that teach nothing",
    ),
    Panel("Entropy", ("entropy",), unit="nats per token"),
    Panel("Gradient norm", ("grad_norm",), note="before clipping"),
    Panel("Clipped tokens", ("clip_fraction",), note="fraction whose gradient the clip cuts off"),
    Panel("Learning rate", ("learning_rate",)),
    Panel("KL to the reference", ("loss/kl",), unit="nats per token"),
    Panel(
        "Observations", ("loss/observation",), unit="nats per token", note="what environments said"
    ),
    Panel("Skipped optimizer steps", ("steps/skipped",)),
    Panel("Staleness of the samples", ("staleness/mean", "staleness/max"), unit="steps"),
    Panel(
        "Load of the busiest expert",
        ("router/load_max_over_mean",),
        note="over that of the average one",
    ),
)

TURNS = (
    Panel("Turns of an episode", ("env/turns",), note="of the model, mean"),
    Panel(
        "Problems of environments",
        ("env/problems",),
        fraction=True,
        note="episodes whose environment raised, hung or died",
    ),
    Panel("Calls of tools", ("tools/call_frequency",), note="per episode"),
    Panel("Failed calls", ("tools/failure_frequency",), fraction=True, note="of all tools"),
    Panel(
        "Calls by tool", ("tools/call_frequency/*",), note="per episode", stacked=True, named=True
    ),
    Panel("Failed calls by tool", ("tools/failure_frequency/*",), fraction=True, named=True),
    Panel(
        "Time by tool",
        ("time/tools/*",),
        unit="seconds per step",
        note="added up; beside the rollout and one another",
        stacked=True,
        named=True,
    ),
)

MISMATCH_FIGURE = Panel(
    "Mismatch",
    ("mismatch/kl_k3",),
    log=True,
    note="k3 estimate of KL(rollout ‖ learner) per token, same weights",
)
MISMATCH = (
    Panel(
        "Tokens that differ",
        ("mismatch/differing_fraction",),
        log=True,
        note="fraction that differs in any bit",
    ),
    Panel(
        "Largest difference",
        ("mismatch/max_abs_logprob_diff",),
        unit="nats",
        log=True,
        note="|learner − rollout|",
    ),
    Panel(
        "Probability ratio error",
        ("mismatch/token_mult_prob_error-1",),
        log=True,
        note="mean of exp|learner − rollout|, minus 1",
    ),
    Panel(
        "Perplexity ratio",
        ("mismatch/ppl_ratio",),
        note="learner over rollout, mean over sequences",
    ),
    Panel(
        "Truncated weights",
        ("correction/clipped_fraction",),
        note="fraction of tokens that a correction truncated",
    ),
    Panel(
        "Effective sample size",
        ("correction/effective_sample_size_untruncated",),
        note="of untruncated weights",
    ),
    Panel(
        "What the correction leaves",
        ("correction/effective_step", "correction/kept_fraction"),
        note="of the step's size, and of the completions",
    ),
    Panel(
        "Experts that differ",
        ("router/differing_choices",),
        log=True,
        note="share of (token, layer) pairs",
    ),
    Panel(
        "Mismatch of stale samples",
        ("staleness/kl_k3",),
        log=True,
        note="samples of older weights only",
    ),
)

BY_POSITION = Panel(
    "Mismatch by position in the completion",
    ("mismatch/kl_k3",),
    log=True,
    note="k3 of tokens n to 2n − 1, mean over the steps at which tokens differ",
    axis="token",
    doubling=True,
)

QUANTIZATION = (
    Panel("Weights: relative error", ("quant/weight_relative_error",), note="all layers"),
    Panel(
        "Weights flushed to zero",
        ("quant/weight_flushed_fraction",),
        log=True,
        note="fraction, all layers",
    ),
    Panel(
        "Weights saturated",
        ("quant/weight_saturated_fraction",),
        log=True,
        note="fraction, all layers",
    ),
    Panel(
        "Activations and gradients: relative error",
        ("quant/activation_relative_error", "quant/gradient_relative_error"),
        note="the learner's, all layers",
    ),
    Panel(
        "Activations and gradients flushed to zero",
        ("quant/activation_flushed_fraction", "quant/gradient_flushed_fraction"),
        log=True,
        note="fraction, all layers",
    ),
    Panel(
        "Activations and gradients saturated",
        ("quant/activation_saturated_fraction", "quant/gradient_saturated_fraction"),
        log=True,
        note="fraction, all layers",
    ),
    Panel(
        "KV cache saturated",
        ("quant/kv_saturated_fraction",),
        log=True,
        note="fraction of keys and values",
    ),
    Panel(
        "Drift of KV scales",
        ("quant/kv_scale_drift",),
        note="largest relative change since the step before",
    ),
)

COST = (
    Panel(
        "Time by phase",
        ("time/rollout", "time/learn", "time/score", "time/sync", "time/calibrate"),
        unit="seconds per step",
        stacked=True,
    ),
    Panel(
        "Throughput",
        ("throughput/rollout_tokens_per_s", "throughput/learn_tokens_per_s"),
        unit="tokens/s",
    ),
    Panel("Peak memory", ("memory/peak_*",), unit="MiB", note="of the process so far"),
    Panel(
        "Memory by use",
        (
            "memory/weights_mib",
            "memory/kv_cache_mib",
            "memory/optimizer_mib",
            "memory/reference_mib",
            "memory/reward_models_mib",
        ),
        unit="MiB",
        stacked=True,
    ),
    Panel("Weights sent at a sync", ("sync/bytes",), unit="bytes"),
)

ALL = (*OUTCOME, *LEARNING, *TURNS, MISMATCH_FIGURE, *MISMATCH, *QUANTIZATION, *COST)
DERIVED = ("mismatch/token_mult_prob_error-1", "mismatch/differing_fraction")
"""Metrics that a report computes from the metrics of a row (`with_derived`)."""
POSITIONS = "mismatch/kl_k3_from_"


def with_derived(row: dict[str, float | None]) -> dict[str, float | None]:
    """Return a row of metrics.jsonl with those metrics of DERIVED that its metrics allow."""
    error = row.get("mismatch/token_mult_prob_error")
    differing, compared = (row.get(f"mismatch/{name}_tokens") for name in ("differing", "compared"))
    derived = dict(row)
    if error is not None:
        derived[DERIVED[0]] = error - 1
    if differing is not None and compared:
        derived[DERIVED[1]] = differing / compared
    return derived


def by_position(run: Series) -> Series:
    """Return the run's series for BY_POSITION: a row for each power of two, whose `step` is that
    position in the completion."""
    names = {name for row in run.rows for name in row if name.startswith(POSITIONS)}
    known = [name for name in names if name.removeprefix(POSITIONS).isdecimal()]
    values = {int(name.removeprefix(POSITIONS)): points(run.rows, name)[1] for name in known}
    rows = [
        {"step": float(n), "mismatch/kl_k3": sum(v) / len(v)}
        for n, v in sorted(values.items())
        if v
    ]
    return Series(run.name, rows)
