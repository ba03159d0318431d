"""Commands before a run: `plan`, `play`."""

from typing import Annotated

import typer

from isobit.cli import completion
from isobit.cli.app import Overrides, app
from isobit.errors import printable


@app.command()
def plan(
    config: Annotated[
        str,
        typer.Argument(
            help="YAML file of a training run, or of a supervised one",
            autocompletion=completion.config_files,
        ),
    ],
    overrides: Overrides = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="N,N", help="numbers of GPUs; default: the config's ranks")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="rtx4090, rtx5090, a100-40, l40s, a100-80, h100, h200 or b200",
            autocompletion=completion.devices,
        ),
    ] = "h200",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="memory of any other card, such as 24GiB; in place of --device"
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="how many tokens a prompt has, since prompts are not read; default: "
            "task.max_prompt_tokens, or at most 512"
        ),
    ] = None,
    completion_tokens: Annotated[
        int | None,
        typer.Option(
            help="how many tokens an answer of a supervised run has, since examples are not read; "
            "default: at most 512"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print bytes as JSON")] = False,
) -> None:
    """Plan the memory of a run on each GPU. Says whether it fits, and which keys lower it. Needs no
    GPU, and reads no weights.

    \b
    isobit plan run.yaml --gpus 8 --device h200
    isobit plan run.yaml precision=bf16 --gpus 1,8,64 --device h100
    isobit plan run.yaml sampling.max_new_tokens=8192 --prompt-tokens 1024 --memory 24GiB
    isobit plan preference.yaml --prompt-tokens 1024 --completion-tokens 1024

    It does not estimate time. The exit code is 2 if the run fits on none of the numbers of GPUs.
    """
    from isobit.config import load_train_or_sft_config
    from isobit.training.commands.plan import plan_command
    from isobit.training.plan import card_named, card_of

    machine = card_named(device) if memory is None else card_of(memory)
    loaded = load_train_or_sft_config(config, overrides or ())
    plan_command(loaded, gpus, machine, (prompt_tokens, completion_tokens), as_json)


@app.command()
def play(
    config: Annotated[
        str,
        typer.Argument(help="YAML file of a training run", autocompletion=completion.config_files),
    ],
    overrides: Overrides = None,
    row: Annotated[
        int, typer.Option(help="which training row, counted from 0 in the run's order")
    ] = 0,
) -> None:
    """Sample one row as a run would, and show all of it: what the model is shown, what is trained,
    the tools' calls and the rewards. Nothing is learned or written.

    \b
    isobit play configs/quickstart.yaml
    isobit play run.yaml --row 3 sampling.temperature=0
    isobit play run.yaml model.path=runs/mine     a run stands for its newest checkpoint
    """
    from isobit.config import load_config
    from isobit.training.commands.play import play as play_row

    play_row(
        load_config(config, overrides or ()), row, lambda text: print(printable(text), flush=True)
    )
