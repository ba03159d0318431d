"""The job that is planned: a run's config with the architectures of its models, on the ranks of a
machine.

Of each model only its config.json is read. Where prompts are not read either, how long they are
is an assumption.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from isobit.config import Config, SftConfig, load_config, load_sft_config
from isobit.config.sections import EngineConfig
from isobit.engine.pages import pages_needed, tokens_of_a_page
from isobit.errors import IsobitError
from isobit.model import ModelConfig
from isobit.model.hub.checkpoint import model_folder, read_json
from isobit.precision import Precision, precision_from
from isobit.rl.algorithm.objective import Objective, shares_prompts
from isobit.run.directory import model_directory
from isobit.training.plan.cards import Machine

_PROMPT_TOKENS = 512
_MOST_EXPERTS = (
    1 << 16
)  # in all layers, in a stranger's config.json: no weights are there to contradict it


@dataclass(frozen=True)
class Given:
    """The sizes of a supervised run.

    Its longest example has an `answer` of that many tokens behind its prompt; `answers`: the most
    answers of an example; `asked`: how many held-out prompts are answered, each of at most
    `question` tokens.
    """

    answer: int
    answers: int = 1
    asked: int = 0
    question: int = 1


@dataclass(frozen=True)
class Job:
    """A run on `ranks` ranks, each with a `machine`; neighbours, as many as `divided`, hold each
    model together, 1 until an `auto` is resolved. `prompt`: tokens of the longest prompt;
    `reference` and `rewards`: architecture and precision of the frozen models; `given`: the answers
    of a supervised run, None where they are sampled."""

    config: Config | SftConfig
    model: ModelConfig
    precision: Precision
    prompt: int
    machine: Machine
    ranks: int = 1
    reference: tuple[ModelConfig, Precision] | None = None
    rewards: tuple[tuple[ModelConfig, Precision], ...] = ()
    given: Given | None = None
    divided: int = 1

    def on(self, ranks: int) -> "Job":
        """Return the job on another number of ranks."""
        return replace(self, ranks=ranks)

    def together(self, divided: int) -> "Job":
        """Return the job with each model held together by `divided` ranks."""
        return replace(self, divided=divided)

    def changed(self, *keys: str) -> "Job":
        """Return the job with these keys of the config changed, as `isobit plan` takes them. Raises
        IsobitError for what cannot be set."""
        now, planned = self.config, (self.model, self.prompt)
        if isinstance(now, SftConfig):
            assert self.given is not None
            changed = load_sft_config(now, keys)
            ranks = changed.ranks if changed.ranks != now.ranks else self.ranks
            job = supervised_job(changed, *planned, self.given, self.machine, ranks)
        else:
            config = load_config(now, keys)
            ranks = config.ranks if config.ranks != now.ranks else self.ranks
            job = job_with(config, *planned, self.machine, ranks=ranks, rewards=self.rewards)
        return job.together(self.divided) if job.config.divided == "auto" else job

    @property
    def sampled(self) -> Config | None:
        """The config of a run that samples what it learns from; None of a supervised one."""
        return self.config if isinstance(self.config, Config) else None

    @property
    def command(self) -> str:
        """The command that runs the job."""
        return "isobit sft" if self.sampled is None else "isobit train"

    @property
    def engine(self) -> EngineConfig:
        """The rollout's engine; a supervised run answers held-out prompts with the default."""
        return EngineConfig() if self.sampled is None else self.sampled.engine

    @property
    def algorithm(self) -> Objective:
        """The objective, as far as it takes memory."""
        return Objective() if self.sampled is None else self.sampled.algorithm

    @property
    def shares_reference(self) -> bool:
        """Whether the reference is the policy's own storage, without its adapter."""
        if self.sampled is None:
            return self.config.adapter is not None and not self.config.reference.follows
        return self.sampled.shares_reference

    @property
    def completion(self) -> int:
        """Tokens of the longest completion, for which the context has room."""
        if isinstance(self.config, SftConfig):
            return 0 if self.given is None else self.given.answer
        return min(self.config.most_tokens, self.model.max_positions - self.prompt)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest completion."""
        return self.prompt + self.completion

    @property
    def group(self) -> int:
        """Completions of a prompt."""
        if isinstance(self.config, SftConfig):
            return 1 if self.given is None else self.given.answers
        return self.config.sampling.group_size

    @property
    def prompts(self) -> int:
        """The number of prompts in a step."""
        return self.config.prompts_per_step

    @property
    def completions(self) -> int:
        """The number of completions in a step."""
        return self.prompts * self.group

    @property
    def engines(self) -> int:
        """The number of engines that sample: ranks that hold the model together are one."""
        return max(1, self.ranks // self.divided)

    @property
    def completions_of_a_rank(self) -> int:
        """The most that a rank samples in a step: groups are not split."""
        if self.sampled is None:
            return 0
        return -(-self.sampled.prompts_under_way // self.engines) * self.group

    @property
    def evaluated(self) -> int:
        """Held-out completions that a rank has room for at a time; 0: none."""
        if isinstance(self.config, SftConfig):
            return 0 if self.given is None else self.given.asked
        evaluation = self.config.evaluation
        samples = max(1, evaluation.num_samples)
        return -(-evaluation.samples * samples // self.engines) if evaluation.every else 0

    @property
    def sampled_lengths(self) -> tuple[int, int]:
        """The tokens of the longest prompt that completions are sampled for, then of the longest
        completion."""
        if not isinstance(self.config, SftConfig):
            return self.prompt, self.completion
        question = 1 if self.given is None else self.given.question
        return question, min(self.config.max_new_tokens, self.model.max_positions - question)

    @property
    def page_size(self) -> int:
        """Tokens of a page of the cache."""
        return tokens_of_a_page(self.model, self.engine.page_size)

    @property
    def pages_of_a_sequence(self) -> int:
        """Pages of the cache for the longest sequence that is sampled."""
        return pages_needed(*self.sampled_lengths, self.page_size)

    @property
    def shares_prompts(self) -> bool:
        """Whether the completions of a prompt share its rows in the learner."""
        mixture, recurrent = self.model.experts is not None, self.model.linear is not None
        wanted, config = self.config.optimizer.share_prompts, self.config
        if isinstance(config, SftConfig):
            wanted = wanted and config.of_pairs
        return shares_prompts(wanted, self.algorithm, mixture=mixture, recurrent=recurrent)


def job_of(
    config: Config,
    machine: Machine,
    prompt_tokens: int | None = None,
    ranks: int | None = None,
    model: ModelConfig | None = None,
) -> Job:
    """Return the job of a config. `prompt_tokens`: by default task.max_prompt_tokens, or 512 where
    the context has room for that many; `ranks`: by default the config's; `model`: by default as
    model.path has it.

    Raises IsobitError where config.json is missing or of no supported architecture, or where
    prompts fill its context.
    """
    if model is None:
        assert config.model.path is not None
        model = architecture(str(model_directory(Path(config.model.path))))
    if prompt_tokens is None:
        prompt_tokens = assumed_prompt(config, model)
    if prompt_tokens >= model.max_positions:
        raise IsobitError(
            f"--prompt-tokens {prompt_tokens} leaves no room for an answer: the model's context is "
            f"{model.max_positions}"
        )
    return job_with(config, model, prompt_tokens, machine, ranks=ranks)


def assumed_prompt(config: Config, model: ModelConfig) -> int:
    """Return how many tokens the longest prompt has, where prompts are not read."""
    room = model.max_positions - config.sampling.max_new_tokens
    return config.task.max_prompt_tokens or max(1, min(_PROMPT_TOKENS, room))


def job_with(
    config: Config,
    model: ModelConfig,
    prompt: int,
    machine: Machine,
    *,
    ranks: int | None = None,
    rewards: tuple[tuple[ModelConfig, Precision], ...] | None = None,
) -> Job:
    """Return the job of a config whose model has this architecture, with the reference and the
    reward models that it names. Raises IsobitError for one that is not supported."""
    reference = None
    if config.algorithm.kl_coefficient > 0:
        path = config.reference.path
        precision = precision_from(config.reference.precision or config.precision)
        config_of_model = model if path is None else architecture(str(model_directory(Path(path))))
        reference = (config_of_model, precision)
    if rewards is None:  # a reward model has no output head
        rewards = tuple(
            (architecture(m.path, tied=True), precision_from(m.precision))
            for m in config.rewards.models
        )
    precision, count = precision_from(config.precision), ranks or config.ranks
    divided = _divided(config)
    return Job(
        config, model, precision, prompt, machine, count, reference, rewards, divided=divided
    )


def _divided(config: Config | SftConfig) -> int:
    """Return the number of ranks that hold a model together, 1 where the config leaves it open."""
    return 1 if config.divided == "auto" else config.divided


def supervised_job(
    config: SftConfig,
    model: ModelConfig,
    prompt: int,
    answers: Given,
    machine: Machine,
    ranks: int | None = None,
) -> Job:
    """Return the job of a supervised run, whose longest prompt has `prompt` tokens."""
    precision = precision_from(config.precision)
    reference = (model, precision) if config.compares else None
    count, divided = ranks or config.ranks, _divided(config)
    return Job(
        config, model, precision, prompt, machine, count, reference, given=answers, divided=divided
    )


def architecture(path: str, tied: bool = False) -> ModelConfig:
    """Read the architecture of a Hugging Face directory from its config.json. Raises IsobitError
    for one that is not supported."""
    file = model_folder(Path(path)) / "config.json"
    values = read_json(file)
    config = ModelConfig.from_hf(
        values | ({"tie_word_embeddings": True} if tied else {}), str(file)
    )
    experts = config.num_mixtures * (0 if config.experts is None else config.experts.count)
    if experts > _MOST_EXPERTS:
        raise IsobitError(
            f"{file}: {experts:,} experts in all layers: expected at most {_MOST_EXPERTS:,}"
        )
    return config


def supervised_job_of(
    config: SftConfig,
    machine: Machine,
    model: ModelConfig,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
) -> Job:
    """Return the job of a supervised run whose examples are not read: a prompt and a completion
    have these numbers of tokens, by default 512 where the context has room, or
    task.max_prompt_tokens. Held-out prompts are answered of a task that is built in, which has a
    reward. Raises IsobitError where both are longer than the context."""
    context, task = model.max_positions, config.task
    prompt = prompt_tokens or task.max_prompt_tokens
    half = context // 2 if prompt is None else max(1, context - prompt)
    completion = completion_tokens or min(_PROMPT_TOKENS, half)
    prompt = prompt or max(1, min(_PROMPT_TOKENS, context - completion))
    if prompt + completion > context:
        raise IsobitError(
            f"a prompt of {prompt} tokens with a completion of {completion} is longer than the "
            f"model's context, {context}: give --prompt-tokens and --completion-tokens that fit"
        )
    samples = config.evaluation.samples
    held_out = samples if task.held_out_size is None else min(samples, task.held_out_size)
    questions = 0 if task.path or task.files or config.compares else held_out
    shape = Given(completion, 2 if config.of_pairs else 1, questions, min(prompt, context - 1))
    return supervised_job(config, model, prompt, shape, machine)
