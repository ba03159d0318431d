"""`isobit train --dry-run`: open everything that a run would open, and say what it is and what memory it takes."""

from pathlib import Path

from isobit.config import Config
from isobit.plan.memory import num_parameters
from isobit.run.directory import refuse_existing
from isobit.training.adapting import rank_warning
from isobit.training.assembly import open_parts
from isobit.training.host import resident_bytes
from isobit.training.lengths import endless, first_prompt
from isobit.training.plan import MemoryPlan, advice, longest_sequence, measure_parts, plan


def planned(config: Config) -> MemoryPlan:
    """The memory plan of a config."""
    process = resident_bytes()
    parts = open_parts(config, quiet=True)
    parts.rewards.close()
    return plan(parts, measure_parts(parts), process, parts.micro_batch_tokens)


def dry_run_report(config: Config) -> str:
    """Open everything that the run would open, and say what it is; writes nothing but the cached base model."""
    refuse_existing(Path(config.run.dir))
    process = resident_bytes()
    parts = open_parts(config, quiet=False)
    parts.rewards.close()
    model = parts.model
    learning = measure_parts(parts)
    parameters = f"{num_parameters(model.config):,} parameters"
    if (adapter := model.transformer.adapter) is not None:
        parameters += f", frozen, and an {adapter}: {model.transformer.masters.count:,} parameters"
    heading = (
        f"{model.config.family}, {parameters}; "
        f"task {parts.task.name}: {len(parts.task.train)} training and {len(parts.task.held_out)} held-out prompts\n"
        f"{config.steps} steps of {config.prompts_per_step} prompts x {config.sampling.group_size} completions; "
        f"correction: {parts.objective.rule}\n{model.ops.why}; consistency: {config.consistency}"
    )
    for warning in (endless(model, config.sampling), rank_warning(config, model)):
        if warning is not None:
            heading += f"\n{warning}"
    memory = "\n".join(
        [
            plan(parts, learning, process, parts.micro_batch_tokens).table(),
            f"longest sequence: {longest_sequence(parts)} tokens; cache: {parts.engine.pages.num_pages} pages; "
            f"micro-batches of {parts.micro_batch_tokens} tokens",
            advice(parts, learning, process),
        ]
    )
    prompt = first_prompt(parts.task.train, model)
    trained = f"{config.optimizer.masters}, {config.optimizer.state}"
    return "\n\n".join([heading, model.precision.table(model.config.num_layers, trained), memory, prompt])
