"""What is planned: a run's config with the architectures of its models, on so many GPUs.

Of each model only its config.json is read. Prompts are not read either: how long they are is an assumption (`Lengths`).
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from isobit.config import Config
from isobit.engine.pages import pages_needed, tokens_of_a_page
from isobit.errors import IsobitError
from isobit.model import ModelConfig
from isobit.model.hub.checkpoint import model_folder, read_json
from isobit.plan.devices import Device
from isobit.precision import Precision, precision_from
from isobit.rl.algorithm.objective import for_precision, shares_prompts
from isobit.rl.learner.packing import MOST_KEYS

_PROMPT_TOKENS = 512
_MOST_EXPERTS = 1 << 16  # in all layers, in a stranger's config.json: no weights are there to contradict it


@dataclass(frozen=True)
class Lengths:
    """Tokens: of a prompt, of a completion on average, and of the longest completion."""

    prompt: int
    mean: float
    longest: int

    @property
    def sequence(self) -> float:
        """A prompt and a completion, on average."""
        return self.prompt + self.mean


@dataclass(frozen=True)
class Job:
    """A run on `ranks` GPUs, `per_node` of them in a machine. `reference` and `rewards`: the frozen models' own
    architectures and flows."""

    config: Config
    model: ModelConfig
    precision: Precision
    lengths: Lengths
    device: Device
    ranks: int = 1
    per_node: int = 8
    reference: tuple[ModelConfig, Precision] | None = None
    rewards: tuple[tuple[ModelConfig, Precision], ...] = ()

    def under(self, precision: Precision, ranks: int) -> "Job":
        """The same under another flow, on another number of GPUs. A reference without a flow of its own follows."""
        reference = self.reference
        if reference is not None and self.config.reference.precision is None:
            reference = (reference[0], precision)
        return replace(self, precision=precision, ranks=ranks, reference=reference)

    @property
    def sum_group(self) -> int:
        """Ranks of a machine whose gradients are added first: those of `optimizer.sum_group` that divide it evenly."""
        return math.gcd(self.config.optimizer.sum_group, min(self.ranks, self.per_node))

    @property
    def completions(self) -> int:
        """Of a step."""
        return self.config.prompts_per_step * self.config.sampling.group_size

    @property
    def completions_of_a_rank(self) -> int:
        """The most that a rank samples in a step: groups are not split."""
        return -(-self.config.prompts_per_step // self.ranks) * self.config.sampling.group_size

    @property
    def page_size(self) -> int:
        """Tokens of a page of the cache."""
        return tokens_of_a_page(self.model, self.config.engine.page_size)

    @property
    def updates(self) -> int:
        """Optimizer steps of a step."""
        return self.config.algorithm.updates_per_batch * self.config.algorithm.epochs

    @property
    def micro_batch_limit(self) -> int:
        """Tokens of a micro-batch, at most; `auto` is taken for the default of the option."""
        given = self.config.optimizer.micro_batch_tokens
        tokens = type(self.config.optimizer).micro_batch_tokens if given == "auto" else given
        assert isinstance(tokens, int)
        return tokens

    @property
    def rows_of_a_sequence(self) -> float:
        """Tokens that the learner computes of one, on average: its completion, and its part in a shared prompt."""
        algorithm, wanted = self.config.algorithm, self.config.optimizer.share_prompts
        mixture, recurrent = self.model.experts is not None, self.model.linear is not None
        if not shares_prompts(wanted, algorithm, mixture=mixture, recurrent=recurrent):
            return self.lengths.sequence
        together = max(1.0, self.config.sampling.group_size / algorithm.updates_per_batch)
        return self.lengths.mean + self.lengths.prompt / together

    @property
    def sequences_of_a_micro_batch(self) -> int:
        """Sequences are not split: at least one."""
        of_an_update = -(-self.completions // self.config.algorithm.updates_per_batch)
        fitting = self.micro_batch_limit / max(self.rows_of_a_sequence, self.lengths.sequence / MOST_KEYS)
        return max(1, min(int(fitting), of_an_update))

    @property
    def micro_batches(self) -> int:
        """Of an optimizer step."""
        of_an_update = -(-self.completions // self.config.algorithm.updates_per_batch)
        return -(-of_an_update // self.sequences_of_a_micro_batch)

    @property
    def rounds(self) -> int:
        """Micro-batches of an optimizer step that the busiest rank computes, with an exchange of gradients each."""
        return -(-self.micro_batches // self.ranks)

    @property
    def recompute_old(self) -> bool:
        """Whether the learner computes old log-probabilities before it learns."""
        stale = bool(self.config.rollouts_ahead or self.config.replay.groups_per_step)
        return for_precision(self.config.algorithm, self.precision, stale=stale).recompute_old

    @property
    def pages_of_a_sequence(self) -> int:
        """Pages of the KV cache for the longest sequence."""
        return pages_needed(self.lengths.prompt, self.lengths.longest, self.page_size)


def job_of(
    config: Config,
    device: Device,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    *,
    per_node: int = 8,
) -> Job:
    """The job of a config on one GPU of the kind. `prompt_tokens`: by default task.max_prompt_tokens, or 512 where the
    context has room for that many; `new_tokens`: of a completion on average, by default the longest.

    Raises IsobitError where config.json is missing or of no supported architecture, or where lengths do not fit it.
    """
    if config.model.path is None:
        raise IsobitError(
            "model.sft: its model is not trained yet and has no config.json; plan with model.path=DIR, model.sft=null"
        )
    model = architecture(config.model.path)
    longest = config.sampling.max_new_tokens
    mean = longest if new_tokens is None else new_tokens
    if mean > longest:
        raise IsobitError(f"--new-tokens {mean}: a completion has at most sampling.max_new_tokens, {longest}")
    if prompt_tokens is None:
        prompt_tokens = config.task.max_prompt_tokens or max(1, min(_PROMPT_TOKENS, model.max_positions - longest))
    room = model.max_positions - prompt_tokens
    if room < 1:
        raise IsobitError(
            f"--prompt-tokens {prompt_tokens} leaves no room for an answer: the model's context is "
            f"{model.max_positions}"
        )
    lengths = Lengths(prompt_tokens, min(mean, room), min(longest, room))
    return job_with(config, model, lengths, device, per_node=per_node)


def job_with(
    config: Config, model: ModelConfig, lengths: Lengths, device: Device, *, ranks: int = 1, per_node: int = 8
) -> Job:
    """The job of a config, with the reference and the reward models that it names. Raises IsobitError for one that is
    not supported."""
    reference = None
    if config.algorithm.kl_coefficient > 0:
        reference = (model, precision_from(config.reference.precision or config.precision))
    return Job(
        config,
        model,
        precision_from(config.precision),
        lengths,
        device,
        ranks,
        per_node=per_node,
        reference=reference,
        # a reward model has no output head
        rewards=tuple((architecture(m.path, tied=True), precision_from(m.precision)) for m in config.rewards.models),
    )


def architecture(path: str, tied: bool = False) -> ModelConfig:
    """Of a Hugging Face directory, by its config.json alone. Raises IsobitError for one that is not supported."""
    file = model_folder(Path(path)) / "config.json"
    values = read_json(file)
    config = ModelConfig.from_hf(values | ({"tie_word_embeddings": True} if tied else {}), str(file))
    experts = config.num_mixtures * (0 if config.experts is None else config.experts.count)
    if experts > _MOST_EXPERTS:
        raise IsobitError(f"{file}: {experts:,} experts in all layers: expected at most {_MOST_EXPERTS:,}")
    return config
