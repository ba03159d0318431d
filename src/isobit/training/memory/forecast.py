"""The memory plan by shapes, before a weight is read: from config.json, the config and the longest prompt's length.

It has the rows of the plan that is counted from tensors (`plan.py`), and its total to a tenth
(`tests/training/test_forecast.py`). Of several ranks it is one's: they share masters, moments and gradients, and on a
CPU the machine's memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from isobit.config import Config
from isobit.engine.engine import CACHE_BYTES
from isobit.kernels import Ops
from isobit.model import ModelConfig
from isobit.model.transformer import head_rows
from isobit.model.weights.masters import MASTERS
from isobit.plan import Device, Job, Lengths
from isobit.plan import memory as shapes
from isobit.plan.job import job_with
from isobit.rl.algorithm.objective import shares_prompts
from isobit.training.memory.host import memory_limit
from isobit.training.memory.plan import PYTHON, Holding, MemoryPlan, advised, gib, laid_out, update_bytes

_GPU_FRACTION = 3
"""Of a GPU's free memory, for keys and values (`Engine.sized_for`)."""


@dataclass(frozen=True)
class Forecast:
    """What one rank of a run will take. `limit`: the memory that it has, `where` what that is; `packs`: the backend
    packs weights; `host`: it computes on a CPU; `process`: bytes of Python and its libraries."""

    job: Job
    limit: int
    where: str
    host: bool
    packs: bool
    process: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest completion."""
        return self.job.lengths.prompt + self.job.config.sampling.max_new_tokens

    @property
    def tokens(self) -> int:
        """Of a micro-batch; `auto` becomes at least one sequence."""
        given = self.job.config.optimizer.micro_batch_tokens
        return self.longest if given == "auto" else given

    def plan(self) -> MemoryPlan:
        return laid_out(self._holding(), self, self.tokens)

    def at(self, tokens: int) -> int:
        """Bytes that a micro-batch takes besides its gradients."""
        return int(shapes.learning_bytes(self.job, tokens, head_rows(self.job.model.vocab_size, self.host)))

    def text(self) -> str:
        """The table, and whether it fits."""
        plan, ranks = self.plan(), self.job.ranks
        whose = "" if ranks == 1 else f", of each of {ranks} ranks"
        least = ", of a micro-batch of one sequence" * (self.job.config.optimizer.micro_batch_tokens == "auto")
        heading = f"memory by config.json, before a weight is read{whose}{least}"
        return f"{heading}\n{plan.table()}\n{advised(plan.total, self.limit, self.where, self._alternatives)}"

    def not_loaded(self) -> str | None:
        """A line where the weights alone, in one process, are more than there is: they cannot be opened here."""
        alone = self._with(self.job.config, ranks=1)._holding()
        held = alone.masters + alone.rollout + alone.learner + alone.packs + sum(size for _, size in alone.others)
        limit = self.limit * self.job.ranks if self.host else self.limit
        if held <= limit:
            return None
        return f"the weights, as masters and as they are multiplied, are {gib(held)}, of {gib(limit)} ({self.where})"

    def cannot_fit(self) -> str | None:
        """A line where weights, moments and one set of gradients are more than there is, whatever the micro-batches."""
        run = self._holding()
        least = run.masters + run.moments + run.gradients + run.rollout + run.learner + run.packs
        least += sum(size for label, size in run.others if label != PYTHON)
        if least <= self.limit:
            return None
        return (
            f"warning: weights, gradients and moments alone are {gib(least)}, of {gib(self.limit)} ({self.where}): "
            "this run will not fit; isobit train --dry-run names the keys that lower it"
        )

    def _with(self, config: Config, ranks: int | None = None) -> "Forecast":
        return replace(self, job=replace(self.job, config=config, ranks=ranks or self.job.ranks))

    def _holding(self) -> Holding:
        job, config = self.job, self.job.config
        model, adapter = job.model, config.adapter
        size, count = shapes.weights(model, job.precision, adapter=adapter), shapes.num_parameters(model, adapter)
        rows = shapes.largest_share(model, job.ranks, adapter)
        moments = shapes.moment_bytes(model, config.optimizer, adapter) * rows / count
        packs = shapes.packed_bytes(model, job.precision, adapter) if self.packs else 0
        held = Holding(
            config,
            model,
            masters=MASTERS[config.optimizer.masters].itemsize * rows,
            moments=int(moments),
            gradients=4 * rows,
            rollout=int(size.total - size.own),
            learner=int(size.own),
            packs=int(packs),
            cache=0,
            others=tuple(self._others()),
            update=update_bytes(shapes.trained(model, adapter), config.optimizer),
            longest=self.longest,
            itemsize=job.precision.learner.compute.itemsize,
            host=self.host,
            shares=shares_prompts(
                config.optimizer.share_prompts,
                config.algorithm,
                mixture=model.experts is not None,
                recurrent=model.linear is not None,
            ),
        )
        return replace(held, cache=self._cache(held))

    def _others(self) -> Iterator[tuple[str, int]]:
        job = self.job
        if job.reference is not None and not job.config.shares_reference:
            yield "reference, working weights only", self._frozen(*job.reference)
        for given, each in zip(job.config.rewards.models, job.rewards, strict=True):
            yield f"{given.name}, working weights only", self._frozen(*each)
        if self.host:
            yield PYTHON, self.process

    def _frozen(self, model: ModelConfig, precision: shapes.Precision) -> int:
        packs = shapes.packed_bytes(model, precision, frozen=True) if self.packs else 0
        return int(shapes.weights(model, precision, frozen=True).total + packs)

    def _cache(self, run: Holding) -> int:
        """Keys and values of the rollout, and of the evaluation."""
        job, evaluation = self.job, self.job.config.evaluation
        held = run.masters + run.moments + run.gradients + run.rollout + run.learner + sum(s for _, s in run.others)
        page = job.page_size * shapes.cache_bytes_of_a_token(job.model, job.precision, job.page_size)
        wanted, taken = [job.completions_of_a_rank], 0.0
        if evaluation.every:
            wanted.append(-(-evaluation.samples * max(1, evaluation.num_samples) // job.ranks))
        for sequences in wanted:
            most = CACHE_BYTES if self.host else max(self.limit - held - taken, 0) / _GPU_FRACTION
            taken += page * shapes.cache_pages(job, sequences, most)
        return int(taken)

    def _alternatives(self) -> list[tuple[str, int]]:
        """Keys that lower the total, each with the one that it gives."""
        config = self.job.config
        optimizer = config.optimizer
        changed = [
            (f"optimizer.micro_batch_tokens={self.longest}", replace(optimizer, micro_batch_tokens=self.longest))
        ]
        if not optimizer.activation_checkpointing:
            for level in ("mlp", True):
                key = f"optimizer.activation_checkpointing={str(level).lower()}"
                changed.append((key, replace(optimizer, activation_checkpointing=level)))
        if optimizer.state == "fp32" and optimizer.name == "adamw":
            changed.append(("optimizer.state=8bit", replace(optimizer, state="8bit")))
        if optimizer.masters == "fp32":
            changed.append(("optimizer.masters=bf16", replace(optimizer, masters="bf16")))
        found = [(key, replace(config, optimizer=each)) for key, each in changed]
        if config.prompts_per_step > 1 and config.algorithm.updates_per_batch <= config.sampling.group_size:
            found.append(("prompts_per_step=1", replace(config, prompts_per_step=1)))
        return [(key, self._with(each).plan().total) for key, each in found]


def forecast(config: Config, model: ModelConfig, longest_prompt: int, ops: Ops, process: int) -> Forecast:
    """Of a run of a model of this architecture, whose longest prompt has so many tokens."""
    limit, where = memory_limit(ops.device)
    host = ops.device.type == "cpu"
    longest = config.sampling.max_new_tokens
    here = Device("this machine", limit, 0, 0, 0, "measured")
    job = job_with(config, model, Lengths(longest_prompt, longest, longest), here, ranks=config.ranks)
    share = limit // config.ranks if host else limit
    whose = f"{where}, for each of {config.ranks} ranks" if host and config.ranks > 1 else where
    return Forecast(job, share, whose, host, ops.backend == "native", process)
