"""What a run takes of memory: one planner, for `isobit plan`, the check before a run, and
`micro_batch_tokens: auto`.

The model is built on PyTorch's `meta` device, which has shapes and no numbers, from its
config.json alone. Its masters, working weights and packs are counted there, and its own forward
and backward run there on a whole micro-batch. Left out: time.
"""

from isobit.training.plan.cards import CARDS, Machine, card_named, card_of
from isobit.training.plan.job import Job, job_of
from isobit.training.plan.memory import MemoryPlan, plan

__all__ = ["CARDS", "Job", "Machine", "MemoryPlan", "card_named", "card_of", "job_of", "plan"]
