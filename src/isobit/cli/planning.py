"""The command `plan`."""

from typing import Annotated

import typer

from isobit.cli import completion
from isobit.cli.app import Overrides, app, names


@app.command()
def plan(
    config: Annotated[str, typer.Argument(help="YAML file of a training run", autocompletion=completion.config_files)],
    overrides: Overrides = None,
    gpus: Annotated[str, typer.Option(metavar="N,N", help="numbers of GPUs")] = "8",
    device: Annotated[str, typer.Option(help="h100, h200, h20 or b200", autocompletion=completion.devices)] = "h200",
    per_node: Annotated[int, typer.Option(help="GPUs of a machine, joined by NVLink")] = 8,
    presets: Annotated[
        str,
        typer.Option(metavar="A,B,C", help="precision flows besides the config's", autocompletion=completion.presets),
    ] = "fp8,fp8-unified,bf16,fp8-rollout,fp8-e2e",
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="tokens of a prompt, which is not read; default: task.max_prompt_tokens, or at most 512"),
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(help="tokens of a completion on average; default: sampling.max_new_tokens")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print bytes and seconds as JSON")] = False,
) -> None:
    """Estimate memory and seconds a step of a run on many GPUs, without any; loads no weights.

    \b
    isobit plan run.yaml --gpus 8 --device h200
    isobit plan run.yaml precision=bf16 optimizer.sum_group=8 --gpus 1,8,64 --device h100
    isobit plan run.yaml sampling.max_new_tokens=8192 --prompt-tokens 1024 --new-tokens 3000

    Times are a model, calibrated on what others published. Exits with 2 where the run fits on none of the numbers.
    """
    from isobit.cli.commands.plan import plan_command
    from isobit.config import load_config

    plan_command(
        load_config(config, overrides or ()),
        gpus,
        device,
        names(presets),
        per_node=per_node,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        as_json=as_json,
    )
