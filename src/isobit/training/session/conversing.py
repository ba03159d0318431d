"""The conversations of a run whose config has an `environment`: the demands on its model, template
and prompts, checked before anything is sampled. Left out: environments (`tasks/environments/`)."""

from isobit.config import Config
from isobit.data.dataset import Example
from isobit.data.episodes import RecordedEnvironments
from isobit.data.turns import Environments
from isobit.engine.dialogue import Dialogue
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.tasks.environments.pool import EnvironmentPool


def open_dialogue(
    config: Config, model: Model, environments: EnvironmentPool, example: Example
) -> Dialogue:
    """Return the dialogue of a run with `environments`, checked on the prompt of the example.
    Raises IsobitError for a prompt that is not a chat, and for a template with which the answers of
    tools, or without tools any message, cannot be appended; other messages are checked when they
    come."""
    dialogue = _dialogue(config, model, environments)
    if isinstance(example.prompt, str):
        raise IsobitError(
            f"environment: {example.place} has a text as its prompt, and turns need chats; set "
            "task.chat: true"
        )
    if environments.tools:
        appending = dialogue.appending(example.prompt)
        (appending.check_shown if dialogue.forks else appending.check)("tool")
    elif environments.answers_turns and environments.max_turns > 1 and not dialogue.forks:
        dialogue.appending(example.prompt).check_end()
    return dialogue


def recorded_dialogue(config: Config, model: Model) -> Dialogue:
    """Return a dialogue with environments that answer as the run recorded."""
    return _dialogue(config, model, RecordedEnvironments(config.environment.max_turns))


def _dialogue(config: Config, model: Model, environments: Environments) -> Dialogue:
    parser = config.environment.parser or "auto"
    forks = config.environment.history == "fork"
    return Dialogue.of(model.tokenizer, environments, parser, config.most_tokens, forks=forks)
