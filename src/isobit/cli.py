"""The command line: `isobit train | sft | generate | eval | report | compare | inspect`.

Declares arguments, calls one function each, and turns `IsobitError` into one line on stderr and an exit code: 2 for a
user's mistake, 1 for a run that failed, 130 or 143 for one that was interrupted and saved. Heavy modules are imported
inside the commands, so that `--help` answers at once.
"""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from isobit import __version__
from isobit.errors import IsobitError

app = typer.Typer(
    name="isobit",
    help="Reinforcement-learning post-training in FP8: rollouts and learner compute the same bits.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key.sub=value]...", help="changes to the config")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress display")]
_PRESETS = (
    "float32, bf16, fp8-rollout, fp8-rollout-kv, fp8-e2e, fp8-unified, fp8, mxfp8, nvfp4, mxfp8-rollout, "
    "nvfp4-rollout; or one changed: fp8[wgrad=bf16]"
)
Precision = Annotated[str, typer.Option(help=f"preset: {_PRESETS}")]
Consistency = Annotated[str, typer.Option(help="bitwise or fast")]
Backend = Annotated[str, typer.Option(help="auto, native or reference")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="a stop string; may be given several times")]


def main() -> None:
    """Entry point of the `isobit` command."""
    try:
        app()
    except IsobitError as error:
        print(f"isobit: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _version(value: bool) -> None:
    if value:
        print(f"isobit {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    pass


@app.command()
def train(
    config: Annotated[str | None, typer.Argument(help="YAML file; not given with --resume or --from-rollouts")] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="go on with an interrupted run")] = None,
    from_rollouts: Annotated[
        Path | None, typer.Option(metavar="RUN", help="repeat the learning of a recorded run, in a new run")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="run directory; default: run.dir")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="validate, load, plan the memory, and stop")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a model with reinforcement learning.

    \b
    isobit train configs/quickstart.yaml                          the main job
    isobit train configs/quickstart.yaml steps=50 precision=bf16  the same, changed
    isobit train configs/quickstart.yaml --dry-run                check everything, plan the memory, stop
    isobit train --resume runs/quickstart                         go on after an interruption, bit for bit
    isobit train --resume runs/quickstart steps=200               the same, and extend it
    isobit train --from-rollouts runs/quickstart --out runs/again repeat the learning without rolling out

    Every key of a config: docs/config.md, or python -m isobit.config
    """
    changes = list(overrides or [])
    if resume is not None or from_rollouts is not None:
        if config is not None:  # there is no config to give: the first argument is an override too
            if "=" not in config:
                raise IsobitError(f"the run has its own config: leave {config!r} out")
            changes = [config, *changes]
        config = None
    elif config is None:
        raise IsobitError("give a config, such as configs/quickstart.yaml, or --resume RUN")
    raise typer.Exit(_train(config, changes, resume, from_rollouts, out, dry_run, quiet))


def _train(
    config: str | None,
    overrides: list[str],
    resume: Path | None,
    from_rollouts: Path | None,
    out: Path | None,
    dry_run: bool,
    quiet: bool,
) -> int:
    from isobit import train as training
    from isobit.config import load_config
    from isobit.setup import dry_run_report

    if resume is not None:
        if from_rollouts is not None or out is not None or dry_run:
            raise IsobitError("--resume goes on with a run where it is; leave --from-rollouts, --out and --dry-run out")
        return training.resume(resume, overrides, quiet=quiet).exit_code
    if from_rollouts is not None:
        if out is None or dry_run:
            raise IsobitError("--from-rollouts makes a new run: say where with --out DIR, without --dry-run")
        return training.replay(from_rollouts, out, overrides, quiet=quiet).exit_code
    assert config is not None
    resolved = load_config(config, [*overrides, *([f"run.dir={out}"] if out is not None else [])])
    if dry_run:
        print(dry_run_report(resolved))
        return 0
    return training.train(resolved, quiet=quiet).exit_code


@app.command()
def sft(
    config: Annotated[str, typer.Argument(help="YAML file, see configs/quickstart-sft.yaml")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="where the model is written; default: out")] = None,
    quiet: Quiet = False,
) -> None:
    """Supervised training on prompt/completion data: the same model, the same precision, before RL.

    \b
    isobit sft configs/quickstart-sft.yaml
    isobit sft configs/quickstart-sft.yaml steps=100 --out runs/base
    """
    from isobit.config import load_sft_config
    from isobit.sft import supervised_run

    changes = list(overrides or [])
    if out is not None:
        changes.append(f"out={out}")
    supervised_run(load_sft_config(config, changes), quiet=quiet)


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="a Hugging Face directory, or a checkpoint of a run")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="may be given several times; default: lines of stdin")
    ] = None,
    n: Annotated[int, typer.Option("-n", help="completions per prompt")] = 1,
    max_new_tokens: Annotated[int, typer.Option()] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    stop: Stop = None,
    seed: Annotated[int, typer.Option()] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="render each prompt with the model's chat template")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="a JSON object a completion, with tokens and logprobs")
    ] = False,
    precision: Precision = "fp8",
    consistency: Consistency = "bitwise",
    backend: Backend = "auto",
) -> None:
    """Sample completions with the rollout engine.

    \b
    isobit generate MODEL --prompt "Once upon a time" --max-new-tokens 64 -n 2
    echo "12+34=" | isobit generate MODEL --temperature 0
    """
    from isobit.engine import Sampling
    from isobit.generate import print_completions

    prompts = list(prompt) if prompt else [line.rstrip("\n") for line in sys.stdin]
    sampling = Sampling(n, max_new_tokens, temperature, top_k, top_p, min_p, seed, tuple(stop or ()))
    print_completions(model, prompts, sampling, (precision, backend, consistency), chat=chat, as_json=as_json)


@app.command("eval")
def evaluate(
    model: Annotated[Path | None, typer.Argument(help="a Hugging Face directory; not with --completions")] = None,
    task: Annotated[str, typer.Option(help="arithmetic, countdown, gsm8k, or file")] = "file",
    data: Annotated[Path | None, typer.Option(help="JSONL, evaluated whole; default: the held-out split")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="option of a built-in task")] = None,
    reward: Annotated[list[str] | None, typer.Option(metavar="FILE.py:FUNCTION")] = None,
    prompt_column: Annotated[str | None, typer.Option()] = None,
    answer_column: Annotated[str | None, typer.Option(help="handed to rewards as `answer`")] = None,
    prompt_template: Annotated[str | None, typer.Option(help="text with {prompt} in it")] = None,
    completions: Annotated[str | None, typer.Option(metavar="COLUMN", help="score this column; no model")] = None,
    samples: Annotated[int | None, typer.Option(help="the first so many examples; default: all")] = None,
    pass_at: Annotated[str, typer.Option(metavar="K,K", help="also pass@k, from -n samples a prompt")] = "",
    n: Annotated[int, typer.Option("-n", help="samples per prompt for pass@k")] = 8,
    max_new_tokens: Annotated[int, typer.Option()] = 256,
    temperature: Annotated[float, typer.Option(help="of the samples for pass@k")] = 1.0,
    stop: Stop = None,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="write the result and every completion as JSON")] = None,
    precision: Precision = "fp8",
    consistency: Consistency = "bitwise",
    backend: Backend = "auto",
) -> None:
    """Accuracy on a held-out split: greedy, and pass@k, with 95 % intervals.

    \b
    isobit eval MODEL --task arithmetic --pass-at 1,4 -n 8
    isobit eval MODEL --task gsm8k --data test.jsonl
    isobit eval MODEL --task file --data mine.jsonl --reward rewards.py:score
    isobit eval --task gsm8k --data test.jsonl --completions answer   score a column of the file
    """
    from isobit.engine import Sampling
    from isobit.evaluate import evaluate_command
    from isobit.tasks import RewardSpec, TaskSettings

    # a file that is given is evaluated whole: it is the held-out split
    path = None if data is None else str(data)
    options = dict(_key_value(text) for text in option or [])
    settings = TaskSettings(task, path, path, None, prompt_column, answer_column, prompt_template, options)
    rewards = [RewardSpec(function) for function in reward or []]
    sampling = Sampling(n, max_new_tokens, temperature, seed=seed, stop=tuple(stop or ()))
    flow = (precision, backend, consistency)
    evaluate_command(model, settings, rewards, sampling, pass_at, samples, completions, out, flow)


def _key_value(text: str) -> tuple[str, object]:
    import yaml

    key, sign, value = text.partition("=")
    if not sign:
        raise IsobitError(f"--option {text!r}: expected KEY=VALUE, such as digits=4")
    return key, yaml.safe_load(value)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(help="default: report.html in the first run")] = None,
) -> None:
    """Write one self-contained HTML page about a run, or several side by side.

    \b
    isobit report runs/quickstart
    isobit report runs/a runs/b --out compare.html
    """
    from isobit.report import write_report

    print(write_report(runs, out if out is not None else runs[0] / "report.html"))


@app.command()
def compare(
    config: Annotated[str, typer.Argument(help="YAML file: a comparison, or a training config")],
    overrides: Overrides = None,
    presets: Annotated[str, typer.Option(metavar="A,B,C", help="precision flows; default: the config's")] = "",
    seeds: Annotated[int | None, typer.Option(help="runs per preset; default: the config's, or 1")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="default: the config's out, or runs/compare")] = None,
    quiet: Quiet = False,
) -> None:
    """Train under several precision flows, same data and seeds, and show what differs: one table, one page.

    \b
    isobit compare configs/compare-recipes.yaml
    isobit compare configs/quickstart.yaml steps=50 --presets bf16,fp8-rollout,fp8 --seeds 3 --out runs/three

    The same command goes on after an interruption; what is finished is not repeated.
    """
    from isobit.compare import compare as run_comparison
    from isobit.config import load_compare_config

    settings = load_compare_config(config, _names(presets), seeds, None if out is None else str(out), overrides or ())
    raise typer.Exit(run_comparison(settings, quiet=quiet))


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="a Hugging Face directory, or a checkpoint of a run")],
    presets: Annotated[
        str, typer.Option(metavar="A,B,C", help="precision flows")
    ] = "fp8,fp8-unified,bf16[engines=separate],fp8-rollout,fp8-rollout-kv,fp8-e2e",
    prompts: Annotated[Path | None, typer.Option(help="JSONL; default: sequences that the model itself begins")] = None,
    prompt_column: Annotated[str, typer.Option()] = "prompt",
    decompose: Annotated[bool, typer.Option("--decompose", help="take the gap of two-engine flows apart")] = False,
    stale: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="an older checkpoint: the gap of a late weight sync")
    ] = None,
    reward_model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="also: how far the flows move its scores and ranks")
    ] = None,
    n: Annotated[int, typer.Option("-n", help="completions per prompt")] = 4,
    max_new_tokens: Annotated[int, typer.Option()] = 48,
    temperature: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    backend: Backend = "auto",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="also write inspection.html and .json")] = None,
) -> None:
    """What precision flows do to a model: quantization noise by tensor, and the mismatch of a real rollout.

    \b
    isobit inspect MODEL
    isobit inspect MODEL --presets fp8,fp8-rollout --decompose --out inspected
    isobit inspect MODEL --prompts gsm8k.jsonl --prompt-column question
    """
    from isobit.engine import Sampling
    from isobit.inspection import inspect_command

    sampling = Sampling(n, max_new_tokens, temperature, seed=seed)
    files = (prompts, prompt_column)
    inspect_command(model, _names(presets), *files, sampling, decompose, stale, reward_model, backend, out)


def _names(presets: str) -> list[str]:
    """Names between commas; those inside brackets are part of a name."""
    return [name.strip() for name in re.split(r",(?![^\[]*\])", presets) if name.strip()]


if __name__ == "__main__":
    main()
