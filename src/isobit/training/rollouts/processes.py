"""The worker processes of a run, in which the user's code runs: reward functions, and the
environments that answer between turns."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from isobit.config import Config
from isobit.data.columns import ANY, unread_line
from isobit.data.dataset import TEMPLATE_KWARGS, Example, Prompt
from isobit.errors import IsobitError
from isobit.run.completions import COMPLETIONS, read
from isobit.run.directory import ENVIRONMENTS_LOG, REWARDS_LOG
from isobit.tasks.builtin import Task
from isobit.tasks.environments.mistakes import Mistake
from isobit.tasks.environments.pool import EnvironmentPool
from isobit.tasks.rewards.pool import RewardPool
from isobit.training.objects import NO_OBJECTS, Objects


@dataclass(frozen=True, eq=False)
class Processes:
    """The processes of reward functions and environments; a context manager that ends them.

    `rewards` leaves out functions that ask for the environment, which are called in the
    environment's process. `recorded`: (name, weight) of all rewards of the run whose rollouts are
    learned from; in such a run no environment is called and nothing is scored.
    """

    rewards: RewardPool
    environments: EnvironmentPool | None = None
    recorded: tuple[tuple[str, float], ...] = ()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all worker processes. May be called again."""
        self.rewards.close()
        if self.environments is not None:
            self.environments.close()

    def print_to(self, run: Path) -> None:
        """Write what the processes print from now on to the logs in the run's directory."""
        self.rewards.output.path = run / REWARDS_LOG
        if self.environments is not None:
            self.environments.output.path = run / ENVIRONMENTS_LOG

    def unread_columns(self, config: Config, examples: Sequence[Example]) -> str | None:
        """Return a line about columns of the data that nothing in a run or an evaluation reads; None
        without any."""
        shown = config.reference.shown
        read = {TEMPLATE_KWARGS, *self.rewards.columns, config.evaluation.tag or ""}
        read |= frozenset() if self.environments is None else self.environments.columns
        if shown is not None:
            read |= {shown.demonstration or ANY}  # feedback is given all of them
        return unread_line(examples, read, supervised=False)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of the tools that prompts show."""
        return () if self.environments is None else self.environments.tools

    @property
    def earned(self) -> tuple[tuple[str, float], ...]:
        """(name, weight) of the rewards that environments give."""
        environments = self.environments
        return self.recorded if environments is None else tuple(environments.reward_weights.items())

    def check(self, config: Config, task: Task, *, quiet: bool) -> None:
        """Raise IsobitError for rows that reward functions cannot score or that have no
        environment, for a config that needs rewards and has none, and for an environment that
        cannot begin its first row (see `begun`)."""
        self.rewards.check_columns(task.train.examples[0].columns)
        examples = (*task.train.examples, *task.held_out.examples)
        self.rewards.check_rows(
            ((example.place, example.columns) for example in examples), quiet=quiet
        )
        if self.environments is not None:
            for example in examples:
                self.environments.check_row(example.place, example.columns)
        some = self.rewards.specs or self.earned or config.rewards.models
        if not some and (config.needs_rewards or config.evaluation.every):
            raise IsobitError(
                "no reward: give rewards.functions or rewards.models, or use a task that has "
                "its own"
            )
        if self.environments is not None:
            train = task.train
            order = (train.at(cursor) for cursor in range(len(train)))
            rows = ((example.place, example.prompt, example.columns) for example in order)
            for row in self.environments.first_rows(rows):
                self.begun(*row, config.rewards.on_error == "stop")

    def begun(self, where: str, prompt: Prompt, columns: Mapping[str, Any], stop: bool) -> Prompt:
        """Return the prompt of a row as its environment begins it. Raises IsobitError where the
        environment cannot begin the row. Without `stop` it raises only a Mistake, and prints any
        other problem as a warning on stderr and returns `prompt`."""
        if self.environments is None:
            return prompt
        try:
            return self.environments.tried(where, prompt, columns)
        except Mistake:
            raise
        except IsobitError as error:
            if stop:
                raise IsobitError(f"{error}; rewards.on_error: skip goes on without it") from None
            print(f"warning: {error}", file=sys.stderr)
            return prompt


def open_processes(
    config: Config, task: Task, objects: Objects = NO_OBJECTS, on_error: str | None = None
) -> Processes:
    """Start the worker processes of a config and return them. `on_error` of reward functions
    replaces the config's, if given. Raises IsobitError for functions and environments that cannot
    be used."""
    specs, options = config.rewards.functions or task.rewards, config.rewards
    environments = None
    if config.environment.used:
        environments = EnvironmentPool(config.environment, specs)
        environments.start()
    elsewhere: Iterable[str] = () if environments is None else environments.called_here
    try:
        rewards = RewardPool(
            [spec for spec in specs if spec.label not in elsewhere],
            deadline_s=options.deadline_s,
            num_workers=options.num_workers,
            on_error=on_error or options.on_error,
            environment=options.environment,
            objects=objects.functions,
        )
    except BaseException:
        if environments is not None:
            environments.close()
        raise
    return Processes(rewards, environments)


def no_processes(config: Config, task: Task, run: Path) -> Processes:
    """Return a `Processes` without any process, for a run that learns from the rollouts of another
    run, in which environments answered. The names and the order of its rewards are those in the
    recorded completions of `run`, that other run."""
    weights = {spec.label: spec.weight for spec in config.rewards.functions or task.rewards}
    weights |= {model.name: model.weight for model in config.rewards.models}
    rows = (row.get("rewards") for row in read(run / COMPLETIONS))
    rewards: Mapping[str, Any] = next((scores for scores in rows if scores), {})
    return Processes(
        RewardPool([]), None, tuple((label, weights.get(label, 1.0)) for label in rewards)
    )
