"""The experiments of the papers on FP8 reinforcement learning, made again at a size that fits a CPU.

    python -m benchmarks.experiments.papers EXPERIMENT WORK --out FILE [--chart PNG] [KEY=VALUE ...]

| experiment | question |
|---|---|
| `on-policy` | Without staleness and without a correction, which flow falls behind, and with which length? |
| `recalibration` | What does it buy to calibrate an FP8 cache in every step? |
| `corners` | FP8 or BF16 in the rollout, FP8 or BF16 in the learner: mismatch and accuracy by step |
| `cache` | Where does the gain of an 8-bit cache come from? |
| `granularity` | Blocks, rows, tensors; float32 scales or powers of two; the backward's formats |
| `experts` | What does router replay buy a mixture of experts, by step? |

A run that FILE has is not done again, and FILE is written after each, so a command that was stopped
goes on where it was. KEY=VALUE changes every run, as on the command line of `isobit train`.
docs/experiments/papers.md shows what came out. Left out: models and completions of the documents'
size.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common import machine
from benchmarks.experiments import sparse_long
from benchmarks.experiments.command import command, write
from benchmarks.experiments.gradient_bias import ROW_BUDGET, Sample
from benchmarks.experiments.papers_tables import draw, table
from benchmarks.models import save_model
from isobit import Engine, Model, RunFailed, Sampling, train
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from isobit.rl.learner.schedule import micro_batches
from isobit.run.directory import read_jsonl
from isobit.training.parts.base import cached_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SERIES = {
    "reward": "reward/mean",
    "kl_k3": "mismatch/kl_k3",
    "token_mult_prob_error": "mismatch/token_mult_prob_error",
    "largest_difference": "mismatch/max_abs_logprob_diff",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "saturated": "quant/kv_saturated_fraction",
    "scale_drift": "quant/kv_scale_drift",
    "differing_choices": "router/differing_choices",
    "compared_tokens": "mismatch/compared_tokens",
}
"""Of every step of a run: what is kept, and its name in metrics.jsonl."""
Config = Mapping[str, Any] | Path
Found = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run, or one measurement: of an arm, by its name, in one case."""

    case: str
    arm: str
    seed: int


@dataclass(frozen=True)
class Experiment:
    """`cases`: what each needs under a folder, and its config. `arms`: by name, the words that an
    arm adds on a command line. `words`: those of all. `perform` makes the numbers of a job."""

    cases: Mapping[str, Callable[[Path], Config]]
    arms: Mapping[str, tuple[str, ...]]
    words: tuple[str, ...] = ()
    seeds: int = 3
    perform: "Callable[[Path, Experiment, Job], Found]" = lambda *given: run(*given)

    def jobs(self) -> Iterator[Job]:
        for seed in range(self.seeds):
            for case in self.cases:
                yield from (Job(case, arm, seed) for arm in self.arms)


def sums(
    terms: int,
    steps: int,
    base_steps: int,
    hidden: int = 64,
    updates: int = 1,
    experts: int = 0,
    rate: float = 1e-4,
) -> Callable[[Path], Config]:
    """The task and the base of docs/experiments/sparse-long.md with `terms` sums, on-policy:
    nothing is sampled ahead, and each batch is learned from once, in `updates` optimizer steps.
    With `experts` the base is a mixture of these, two of them for a token."""

    def config(work: Path) -> Config:
        size = replace(
            sparse_long.Size(), terms=terms, hidden=hidden, base_steps=base_steps, prompts=16,
            group=8, held_out=128, steps=steps,
        )  # fmt: skip
        folder = work / f"{terms}-sums-of-{hidden}-{experts}-after-{base_steps}"
        sparse_long.write_data(folder, size)
        base = sparse_long.base_config(folder, size)
        if experts:
            mixture = {"family": "qwen3_moe", "num_experts": experts, "experts_per_token": 2}
            base["model"]["init"] |= mixture
        (folder / "base.yaml").write_text(json.dumps(base), encoding="utf-8")
        found = sparse_long.run_config(folder, size, sparse_long.Job("bf16", "none", rate, 0))
        found["algorithm"] |= {"updates_per_batch": updates, "epochs": 1}
        return {**found, "rollouts_ahead": 0}

    return config


def larger_keys(of: Callable[[Path], Config], factor: int) -> Callable[[Path], Config]:
    """The same function with keys `factor` times as large and queries as much smaller: a power of
    two, so that BF16 changes no other bit."""

    def config(work: Path) -> Config:
        found = dict(of(work))
        base, folder = cached_model(found["model"]["sft"]), work / f"keys-times-{factor}"
        shutil.copytree(base, folder, dirs_exist_ok=True)
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            for name, tensor in tensors.items():
                by = {"k_norm": factor, "q_norm": 1 / factor}.get(name.split(".")[-2], 1)
                tensors[name] = tensor * by
            save_file(tensors, file, {"format": "pt"})
        return found | {"model": {"path": str(folder)}}

    return config


def run(work: Path, experiment: Experiment, job: Job) -> Found:
    """A run of `isobit train`: its evaluations, and the series of its steps."""
    folder = work / "runs" / f"{job.case}-{job.arm}-{job.seed}".replace(" ", "-").replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    given, stopped = experiment.cases[job.case](work), ""
    words = (*_QUIET, *experiment.words, *experiment.arms[job.arm])
    try:
        done = train(given, [*words, f"seed={job.seed}", f"run.dir={folder}"], quiet=True)
        if done.exit_code:
            raise KeyboardInterrupt
    except RunFailed as failure:
        stopped = str(failure)
    rows = list(read_jsonl(folder / "metrics.jsonl"))
    shutil.rmtree(folder)
    held_out = [[row["step"], row["accuracy/held_out"]] for row in rows if _EVALUATED in row]
    steps = [row for row in rows if row["step"] > 0]
    series = {
        name: [None if row.get(key) is None else float(f"{row[key]:.4g}") for row in steps]
        for name, key in SERIES.items()
        if any(row.get(key) is not None for row in steps)
    }
    return {"held_out": held_out, "stopped": stopped, **series}


def cache(work: Path, experiment: Experiment, job: Job) -> Found:
    """Sample with a cache of `BYTES`, and with one that holds everything: what was computed in
    each, and the tokens that differ, of which there are none."""
    made = dict(experiment.cases[job.case](work))
    model = Model.load(made["model"], experiment.arms[job.arm][0])
    prompts = [f"{number}+{2 * number}=" for number in range(made["prompts"])]
    sampling = Sampling(n=10, max_new_tokens=made["new_tokens"], seed=job.seed)
    of_a_page = Engine(model, kv_pages=1).kv_bytes
    found, texts = Found(), []
    for name, pages in (("fixed", made["bytes"] // of_a_page), ("ample", 4096)):
        engine = Engine(model, kv_pages=int(pages))
        groups = engine.generate(prompts, sampling)
        texts.append([completion.token_ids for group in groups for completion in group])
        stats = engine.stats
        computed = stats.prefill_tokens + stats.decode_tokens
        found |= {
            f"{name}_computed": computed, f"{name}_steps": stats.steps,
            f"{name}_preemptions": stats.preemptions, f"{name}_pages": int(pages),
        }  # fmt: skip
    differing = sum(a != b for left, right in zip(*texts) for a, b in zip(left, right, strict=True))
    return {
        **found, "bytes_of_a_page": of_a_page, "sampled": sum(map(len, texts[0])),
        "recomputed": found["fixed_computed"] - found["ample_computed"], "differing": differing,
    }  # fmt: skip


def _cached(new_tokens: int) -> Callable[[Path], Config]:
    """A random model, and what it is asked for: lengths of its completions are those at which it
    happens to end them."""

    def given(work: Path) -> Config:
        model = work / "random"
        if not model.exists():
            save_model(model, 256, 4, 512, positions=2048)
        return {"model": model, "prompts": 4, "new_tokens": new_tokens, "bytes": BYTES}

    return given


def trained_and_compared(work: Path, experiment: Experiment, job: Job) -> Found:
    """A run, and before it the error of the gradient of one batch at the base: under the arm's
    flow, against the same batch in float32."""
    given = dict(experiment.cases[job.case](work))
    base = cached_model(given["model"]["sft"])
    samples, advantages = _batch(Model.load(base, "bf16"), given, job.seed)
    words = dict(word.split("=", 1) for word in experiment.arms[job.arm])
    exact, own = (
        gradient(Model.load(base, flow, consistency=words.get("consistency", "bitwise")), samples,
            advantages) for flow in ("float32", words["precision"])
    )  # fmt: skip
    error = float((own - exact).norm() / exact.norm())
    return {"gradient_error": float(f"{error:.4g}"), **run(work, experiment, job)}


def _batch(model: Model, given: Config, seed: int) -> tuple[list[Sample], list[float]]:
    """Completions of held-out prompts, as many as a step's, and their advantages."""
    lines = Path(given["task"]["held_out_path"]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: given["prompts_per_step"]]]
    sampling = Sampling(
        n=given["sampling"]["group_size"], max_new_tokens=given["sampling"]["max_new_tokens"],
        seed=seed,
    )  # fmt: skip
    prompts = [row["prompt"] for row in rows]
    engine = Engine.sized_for(model, prompts, sampling.n, sampling.max_new_tokens)
    samples, advantages = list[Sample](), list[float]()
    for number, (row, group) in enumerate(
        zip(rows, engine.generate(prompts, sampling), strict=True)
    ):
        rewards = [float(each.text.endswith("#" + row["answer"])) for each in group]
        advantages += [reward - sum(rewards) / len(rewards) for reward in rewards]
        samples += [
            Sample(tuple(each.prompt_token_ids), tuple(each.token_ids), tuple(each.logprobs), (),
                number) for each in group
        ]  # fmt: skip
    return samples, advantages


def gradient(model: Model, samples: Sequence[Sample], advantages: Sequence[float]) -> torch.Tensor:
    """Of Σ A · log π, all masters in one float64 vector."""
    for part in micro_batches(samples, ROW_BUDGET):
        logprobs = forward(model, pack([samples[i] for i in part]), 1.0)[0]
        counts = torch.tensor([len(samples[i].completion_ids) for i in part])
        by_token = torch.tensor([advantages[i] for i in part]).repeat_interleave(counts)
        (logprobs * by_token).sum().backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def _of(precision: str, correction: str = "auto", *words: str) -> tuple[str, ...]:
    return f"precision={precision}", f"algorithm.correction={correction}", *words


BYTES = 10 * 2**20
"""Of the fixed cache."""
_EVALUATED = "accuracy/held_out"
_QUIET = ("run.checkpoint_every=100000", "run.report=false", "run.completions=none",
    "run.quantization_every=0", "run.check_memory=false")  # fmt: skip
_FLOWS = ("bf16", "fp8-unified", "fp8", "fp8-e2e", "fp8-rollout", "fp8-rollout-kv", "nvfp4-rollout")
_UNIFIED = {
    f"{part}, {scale}": _of(
        f"fp8-unified[weight_granularity={weight}, activation_granularity={row}, "
        f"gradient_granularity={row}, weight_scale={scale}, activation_scale={scale}, "
        f"gradient_scale={scale}]",
        "auto",
        *(("consistency=fast",) if part == "tensor" else ()),
    )
    for part, weight, row in (
        ("block", "128x128", "1x128"),
        ("row", "row", "row"),
        ("tensor", "tensor", "tensor"),
    )
    for scale in ("fp32", "ue8m0")
}
_CORNERS = {
    "BF16, BF16": "bf16[engines=separate]",
    "FP8, BF16": "fp8-rollout",
    "FP8, FP8": "fp8-e2e",
    "BF16, FP8": "{preset: fp8-e2e, rollout: {weight: bf16, activation: bf16}}",
}
"""NeMo RL's recipes by rollout and learner, and the fourth."""
_BATCH, _PROMPTS = (
    f"fp8-rollout-kv[kv_calibration={{}}, kv_calibration_data={data}]"
    for data in ("batch", "prompts")
)
EXPERIMENTS: Mapping[str, Experiment] = {
    "on-policy": Experiment(
        cases={
            "30 tokens": sums(24, 60, 300),
            "30 tokens, eight updates": sums(24, 60, 300, updates=8),
            "125 tokens": sums(120, 40, 600),
            "245 tokens": sums(240, 40, 600),
            "125 tokens, rate 2e-4": sums(120, 40, 600, rate=2e-4),
            "30 tokens, keys times 128": larger_keys(sums(24, 60, 300), 128),
            "30 tokens, keys times 256": larger_keys(sums(24, 60, 300), 256),
        },
        arms={
            **{flow: _of(flow, "none") for flow in _FLOWS},
            "fp8-rollout, token TIS": _of("fp8-rollout", "token_tis"),
            "nvfp4-rollout, token TIS": _of("nvfp4-rollout", "token_tis"),
            "never calibrated": _of("fp8-rollout-kv[kv_calibration=never]", "none"),
            "never calibrated, token TIS": _of("fp8-rollout-kv[kv_calibration=never]", "token_tis"),
        },
    ),
    "recalibration": Experiment(
        cases={
            "as trained": sums(120, 20, 600),
            "keys times 256": larger_keys(sums(120, 20, 600), 256),
        },
        arms={
            **{f"{when}, batch": _of(_BATCH.format(when)) for when in ("every_step", "once")},
            **{f"{when}, prompts": _of(_PROMPTS.format(when)) for when in ("every_step", "once")},
            "every_step, vLLM's margins": _of("fp8-rollout-kv-verl"),
            "never": _of("fp8-rollout-kv[kv_calibration=never]"),
        },
        words=("evaluation.every=20",),
    ),
    "corners": Experiment(
        cases={"three-digit additions": lambda _: CONFIGS / "quickstart.yaml"},
        arms={
            **{name: _of(flow, "none") for name, flow in _CORNERS.items()},
            "FP8, BF16; TIS": _of(_CORNERS["FP8, BF16"], "token_tis"),
            "FP8, FP8; TIS": _of(_CORNERS["FP8, FP8"], "token_tis"),
        },
        words=("steps=150", "evaluation={every: 15, samples: 512}"),
    ),
    "cache": Experiment(
        cases={f"{length} tokens": _cached(length) for length in (128, 256, 512)},
        arms={
            "bf16": ("bf16",),
            "linear layers alone": ("fp8[kv_cache=bf16]",),
            "cache alone": ("bf16[kv_cache=int8]",),
            "both": ("fp8",),
        },
        seeds=1,
        perform=cache,
    ),
    "granularity": Experiment(
        cases={"30 tokens": sums(24, 40, 150, hidden=256)},
        arms={
            "bf16": _of("bf16"),
            **_UNIFIED,
            "block, fp32, gradients e5m2": _of("fp8-unified[gradient_format=e5m2]"),
            "block, fp32, WGrad bf16": _of("fp8-unified[wgrad=bf16]"),
            "block, fp32, own copy": _of("fp8-unified[wgrad_activation=own-copy]"),
        },
        perform=trained_and_compared,
    ),
    "experts": Experiment(
        cases={"30 tokens, 8 experts": sums(24, 80, 300, experts=8)},
        arms={
            f"{flow}{', replay' if replay else ''}": _of(
                flow, "token_tis", f"algorithm.router_replay={str(replay).lower()}"
            )
            for flow in ("bf16[engines=separate]", "fp8-rollout", "fp8-e2e")
            for replay in (False, True)
        } | {"fp8": _of("fp8")},
    ),
}  # fmt: skip


def main() -> None:
    parser = command(__file__, __doc__, "JSON; runs that are in it are not done again")
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("work", type=Path, metavar="WORK", help="a folder for data and runs")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="of every run")
    parser.add_argument("--seeds", type=int, help="of each arm")
    parser.add_argument("--case", action="append", help="may be given several times; default: all")
    parser.add_argument("--arm", action="append", help="may be given several times; default: all")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="also draw it")
    given = parser.parse_intermixed_args()  # KEY=VALUE may stand after options
    experiment = EXPERIMENTS[given.experiment]
    for option in ("case", "arm"):
        known = getattr(experiment, f"{option}s")
        if unknown := [name for name in getattr(given, option) or () if name not in known]:
            parser.error(f"--{option} {unknown[0]!r}: choose from {', '.join(map(repr, known))}")
    experiment = replace(
        experiment, seeds=given.seeds or experiment.seeds,
        words=(*experiment.words, *given.changes),
    )  # fmt: skip
    found: Found = {"experiment": given.experiment, "words": list(experiment.words), "runs": []}
    if given.out.is_file():
        kept = json.loads(given.out.read_text(encoding="utf-8"))
        if (kept["experiment"], kept["words"]) != (found["experiment"], found["words"]):
            parser.error(f"{given.out} has runs of {kept['experiment']} with {kept['words']}")
        found = kept
    given.work.mkdir(parents=True, exist_ok=True)
    done = {Job(each["case"], each["arm"], each["seed"]) for each in found["runs"]}
    for job in experiment.jobs():
        if job.case not in (given.case or [job.case]) or job.arm not in (given.arm or [job.arm]):
            continue
        if job not in done:
            print(job, flush=True)
            found["runs"].append(
                {**asdict(job), **experiment.perform(given.work.resolve(), experiment, job)}
            )
            found |= {"machine": machine()}
            write(given.out, found)
    if given.chart:
        draw(found, given.chart)
    print(table(found))


if __name__ == "__main__":
    main()
