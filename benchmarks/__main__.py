"""Run the benchmarks: `python -m benchmarks [NAME ...] [--out DIR] [--rounds N]`."""

import argparse
from importlib import import_module
from pathlib import Path

import torch

NAMES = (
    "rollout",
    "beside_others",
    "grpo_step",
    "learning",
    "saved_bytes",
    "step_memory",
    "fits",
    "frozen_base",
    "memory_plan",
    "divided",
    "ranks",
    "optimizers",
    "serve",
    "adapters",
    "serve_step",
    "turns",
    "turns_memory",
)
LARGE = ("long_completions", "speculation")
"""Only by name: many minutes and GiB, or data of others."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Times, ratios and the claims they hold."
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"default: all of {', '.join(NAMES)}; by name also {', '.join(LARGE)}",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write one JSON file per benchmark"
    )
    parser.add_argument("--rounds", type=int, default=7, help="counted runs of every contestant")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - {*NAMES, *LARGE}):
        parser.error(f"unknown benchmark {unknown[0]!r}; there are {', '.join(NAMES + LARGE)}")
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    torch.set_num_threads(arguments.threads)
    for name in arguments.names or NAMES:
        torch.manual_seed(0)
        result = import_module(f"benchmarks.{name}").run(arguments.rounds)
        result.print()
        if arguments.out is not None:
            result.write(arguments.out)


if __name__ == "__main__":
    main()
