"""Commands that use a model: `generate`, `eval`, `inspect`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from isobit.cli import completion
from isobit.cli.app import Backend, Consistency, Precision, Stop, app, names
from isobit.errors import IsobitError


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
def inspect(
    model: Annotated[Path, typer.Argument(help="a Hugging Face directory, or a checkpoint of a run")],
    presets: Annotated[
        str, typer.Option(metavar="A,B,C", help="precision flows", autocompletion=completion.presets)
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
    inspect_command(model, names(presets), *files, sampling, decompose, stale, reward_model, backend, out)
