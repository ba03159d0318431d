"""The command line of `isobit eval`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from isobit.cli import completion
from isobit.cli.app import (
    Adapters,
    Column,
    Stop,
    TemplateKwargs,
    adapters,
    app,
    columns,
    template_kwargs,
    values_of,
)
from isobit.errors import IsobitError

_Side = Annotated[
    Path | None, typer.Argument(help="a Hugging Face directory, a run, or a saved result (.json)")
]
_Against = Annotated[
    Path | None, typer.Option(metavar="MODEL", help="a second model, compared on the same prompts")
]
_Best = Annotated[bool, typer.Option("--best", help="use a run's best model instead of its newest")]
_Task = Annotated[
    str | None,
    typer.Option(help="a built-in task, such as gsm8k, or file; default: the run's, or file"),
]
_Data = Annotated[
    Path | None,
    typer.Option(help="file or directory, every row of it; default: the held-out split"),
]
_Split = Annotated[
    str | None, typer.Option(help="split of a directory with several; default: test")
]
_Chat = Annotated[
    bool,
    typer.Option(
        "--chat", help="make each text prompt a user's message; gsm8k's template is then left out"
    ),
]
_ChatTemplate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Jinja file, for a model without a chat template"),
]
_System = Annotated[str | None, typer.Option(help="system message before every chat")]
_Option = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="option of a built-in task: digits=2, instruction=true"),
]
_Reward = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|FILE.py:FUNCTION",
        help='or NAME:{"option": value}; may be given several times',
    ),
]
_Environment = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="environment variable that rewards get, such as a judge's key; may be given "
        "several times",
    ),
]
_Template = Annotated[
    str | None,
    typer.Option(help="text with {prompt} in it; default: the task's own (gsm8k has one)"),
]
_Completions = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="score this column instead of a model")
]
_Samples = Annotated[
    int | None,
    typer.Option(
        help="ask only this many prompts, the first ones; default: all, or the run's number"
    ),
]
_Tag = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="report each value of this column too")
]
_Pattern = Annotated[
    str | None, typer.Option(metavar="REGEX", help="finds the answer in a completion, for maj@k")
]
_N = Annotated[
    int | None, typer.Option("-n", help="samples per prompt; default: 0, or 8 with --pass-at")
]
_PassAt = Annotated[
    str | None, typer.Option(metavar="K,K", help="pass@k and maj@k; default: 1 and -n")
]
_NewTokens = Annotated[int | None, typer.Option(help="default: 256, or the run's")]
_Temperature = Annotated[float | None, typer.Option(help="for samples; default: 1, or the run's")]
_TopK = Annotated[
    int | None, typer.Option(help="for samples; default: 0, which is off, or the run's")
]
_TopP = Annotated[float | None, typer.Option(help="for samples; default: 1, or the run's")]
_MinP = Annotated[float | None, typer.Option(help="for samples; default: 0, or the run's")]
_Penalty = Annotated[
    float | None,
    typer.Option(help="for greedy completions too; default: 1, which is off, or the run's"),
]
_Seed = Annotated[int | None, typer.Option(help="for samples; default: 0, or the run's")]
_Out = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="write the result and every completion")
]
_Precision = Annotated[
    str | None,
    typer.Option(help="preset; default: fp8, or the run's", autocompletion=completion.presets),
]
_Consistency = Annotated[
    str | None,
    typer.Option(
        help="bitwise (-tdp32, -vdp32), exact or fast; default: bitwise, or the run's",
        autocompletion=completion.consistencies,
    ),
]
_Backend = Annotated[
    str | None,
    typer.Option(
        help="auto, triton, native or reference; default: auto, or the run's",
        autocompletion=completion.backends,
    ),
]


@app.command("eval")
def evaluate(
    model: _Side = None,
    against: _Against = None,
    adapter: Adapters = None,
    best: _Best = False,
    task: _Task = None,
    data: _Data = None,
    option: _Option = None,
    reward: _Reward = None,
    environment: _Environment = None,
    column: Column = None,
    split: _Split = None,
    prompt_template: _Template = None,
    chat: _Chat = False,
    system: _System = None,
    chat_template: _ChatTemplate = None,
    chat_template_kwargs: TemplateKwargs = None,
    completions: _Completions = None,
    samples: _Samples = None,
    tag: _Tag = None,
    answer_pattern: _Pattern = None,
    n: _N = None,
    pass_at: _PassAt = None,
    max_new_tokens: _NewTokens = None,
    temperature: _Temperature = None,
    top_k: _TopK = None,
    top_p: _TopP = None,
    min_p: _MinP = None,
    repetition_penalty: _Penalty = None,
    stop: Stop = None,
    seed: _Seed = None,
    out: _Out = None,
    precision: _Precision = None,
    consistency: _Consistency = None,
    backend: _Backend = None,
) -> None:
    """Evaluate a model on held-out prompts, or compare two models. Prints greedy accuracy, pass@k,
    maj@k and mean reward, with intervals.

    \b
    isobit eval MODEL --task gsm8k --data test.jsonl
    isobit eval MODEL --data mine.jsonl --reward rewards.py:score --tag level -n 8 --pass-at 1,4,8
    isobit eval RUN                                  the newest checkpoint, on the run's task by its rewards
    isobit eval RUN --best --against BASE_MODEL      paired: same prompts, same seeds, a significance test
    isobit eval MODEL --adapter math=RUN --adapter code=DIR --data test.jsonl   one pass, each against MODEL alone
    isobit eval a.json --against b.json              the same, from two results saved with --out
    isobit eval --task gsm8k --data test.jsonl --completions answer   score a column of the file
    """
    ks = None if pass_at is None else _ks(pass_at, n)
    asked = {"samples": samples, "num_samples": n, "pass_at": ks, "temperature": temperature}
    asking = {"prompt_template": prompt_template, "chat": chat or None, "system": system}
    kept = {
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    values: dict[str, Any] = {
        "model": {
            "chat_template": None if chat_template is None else str(chat_template),
            "chat_template_kwargs": template_kwargs(chat_template_kwargs) or None,
        },
        "task": {**_task(task, data, split, option), "columns": columns(column) or None, **asking},
        "rewards": {
            "functions": [_reward(text) for text in reward or ()] or None,
            "environment": environment or None,
        },
        "sampling": {"max_new_tokens": max_new_tokens, "stop": stop or None, **kept},
        "evaluation": {**asked, "tag": tag, "answer_pattern": answer_pattern},
    }
    values |= {"seed": seed, "precision": precision, "consistency": consistency, "backend": backend}
    _evaluate_or_show(model, against, _given(values), best, completions, adapters(adapter), out)


def _evaluate_or_show(
    first: Path | None,
    second: Path | None,
    given: dict[str, Any],
    best: bool,
    completions: str | None,
    of: dict[str, Path],
    out: Path | None,
) -> None:
    """Results that are saved are shown without what an evaluation needs to import."""
    from isobit.evaluation.shown import check_out, is_saved, show_saved

    check_out(out)
    if first is not None and is_saved(first) and (second is None or is_saved(second)):
        return show_saved(first, second, out, changed=bool(given or best or completions or of))
    from isobit.cli.commands.evaluate import Request, evaluate_command

    return evaluate_command(first, second, Request(given, best, completions, of), out)


def _reward(text: str) -> dict[str, Any]:
    from isobit.tasks.rewards.spec import parse_reward

    spec = parse_reward(text)
    return {"function": spec.function, "options": dict(spec.options)}


def _task(
    name: str | None, data: Path | None, split: str | None, options: list[str] | None
) -> dict[str, Any]:
    """Data that are given are evaluated whole: they are the held-out split."""
    path = None if data is None else str(data)
    files = {"path": path, "held_out_path": path, "split": split, "held_out_split": split}
    return {
        "name": name,
        **files,
        "files": None if path is None else [],
        "options": values_of("--option", options, "digits=4") or None,
    }


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None, and without sections of which nothing is left."""
    kept = {
        key: _given(value) if isinstance(value, Mapping) else value for key, value in values.items()
    }
    return {key: value for key, value in kept.items() if value is not None and value != {}}


def _ks(text: str, n: int | None) -> list[int]:
    try:
        ks = [int(part) for part in text.split(",")]
    except ValueError:
        raise IsobitError(f"--pass-at {text!r}: expected whole numbers, such as 1,4") from None
    for k in ks:
        if k < 1 or (n is not None and k > n):
            raise IsobitError(
                f"--pass-at {k}: needs 1 to -n samples" + ("" if n is None else f", and -n is {n}")
            )
    return ks
