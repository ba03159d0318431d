"""The command line of `isobit eval`."""

from pathlib import Path
from typing import Annotated

import typer

from isobit.cli.app import Adapters, Overrides, adapters, app
from isobit.cli.keys import KeyCommand, Short, first_override, formerly

_REWARD = 'a name, or FILE.py:FUNCTION; with options NAME:{"option": value}'


def _task(name: str) -> list[str]:
    """Return the overrides for a task in place of a run's."""
    from isobit.config.reading import override

    return ["task={}", override("task.name", name)]


def _data(file: str) -> list[str]:
    """Return the overrides for data that are evaluated whole: they are the held-out split."""
    from isobit.config.reading import override

    paths = [override(f"task.{key}", file) for key in ("path", "held_out_path")]
    return [*paths, "task.files=[]", "task.held_out_size=null"]


def _split(name: str) -> list[str]:
    from isobit.config.reading import override

    return [override(f"task.{key}", name) for key in ("split", "held_out_split")]


class _Eval(KeyCommand):
    has_defaults = False
    shorts = (
        Short("--task", "task.name", _task),
        Short("--data", "task.path", _data, help="file or directory that is evaluated whole"),
        Short("--column", "task.columns"),
        Short("--chat", "task.chat"),
        Short("--reward", "rewards.functions", help=_REWARD),
        Short("--samples", "evaluation.samples"),
        Short("--tag", "evaluation.tag"),
        Short("-n", "evaluation.num_samples"),
        Short("--pass-at", "evaluation.pass_at"),
        Short("--temperature", "evaluation.temperature"),
        Short("--max-new-tokens", "sampling.max_new_tokens"),
        Short("--precision", "precision"),
        Short("--seed", "seed"),
        Short("--split", "task.held_out_split", _split, former=True),
        *formerly(
            option="task.options",
            prompt_template="task.prompt_template",
            system="task.system",
            environment="rewards.environment",
            chat_template="model.chat_template",
            chat_template_kwargs="model.chat_template_kwargs",
            answer_pattern="evaluation.answer_pattern",
            top_k="evaluation.top_k",
            top_p="evaluation.top_p",
            min_p="sampling.min_p",
            repetition_penalty="sampling.repetition_penalty",
            stop="sampling.stop",
            consistency="consistency",
            backend="backend",
        ),
    )

    @staticmethod
    def schema() -> type:
        from isobit.config import Config

        return Config


@app.command("eval", cls=_Eval)
def evaluate(
    model: Annotated[
        Path | None,
        typer.Argument(help="a Hugging Face directory, a run, or a saved result (.json)"),
    ] = None,
    overrides: Overrides = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="a second model, compared on the same prompts"),
    ] = None,
    adapter: Adapters = None,
    best: Annotated[
        bool, typer.Option("--best", help="use a run's best model instead of its newest")
    ] = False,
    completions: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="score this column instead of a model")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="write the result and every completion")
    ] = None,
) -> None:
    """Evaluate a model on held-out prompts, or compare two models. Prints greedy accuracy, pass@k,
    maj@k and mean reward, with intervals. Keys are those of a training config; of a run its own
    are the defaults.

    \b
    isobit eval MODEL --task gsm8k --data test.jsonl
    isobit eval MODEL --data mine.jsonl --reward rewards.py:score --tag level -n 8 evaluation.pass_at=[1,4,8]
    isobit eval RUN                                  the newest checkpoint, on the run's task by its rewards
    isobit eval RUN --best --against BASE_MODEL      paired: same prompts, same seeds, a significance test
    isobit eval MODEL --adapter math=RUN --adapter code=DIR --data test.jsonl   one pass, each against MODEL alone
    isobit eval a.json --against b.json              the same, from two results saved with --out
    isobit eval --task gsm8k --data test.jsonl --completions answer   score a column of the file
    """
    from isobit.evaluation.shown import check_out, is_saved, show_saved

    check_out(out)
    first, changes = first_override(model, overrides or ())
    folders = adapters(adapter)
    if first is not None and is_saved(first) and (against is None or is_saved(against)):
        changed = bool(changes or best or completions or folders)
        return show_saved(first, against, out, changed=changed)
    from isobit.training.commands.evaluate import Request, evaluate_command

    return evaluate_command(first, against, Request(changes, best, completions, folders), out)
