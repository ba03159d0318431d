"""Recipes of tinker-cookbook, as they are on PyPI, against a local server.

    isobit serve MODEL --train --token serve.token
    python examples/cookbook.py math_rl http://127.0.0.1:8000 serve.token MODEL STEPS

MODEL is the folder, by its whole path: the recipe reads the tokenizer there. Where a recipe would
load data or a tokenizer from a hub, it is given a dataset or a model that is here, through its own
parameters. Printed at the end are the first and the last value of some metrics, and in how many
steps they are exactly 0.0. `kl_sample_train` is the cookbook's mean difference between a token's
log-probability when it was sampled and when it is trained on.
"""

import asyncio
import functools
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RENDERER = "role_colon"
"""How conversations are written, for a model that has no chat template."""
ADAPTER = {"lora_rank": 8, "learning_rate": 1e-3}
SHOWN = (
    "optim/kl_sample_train_v1",
    "optim/kl_sample_train_v2",
    "env/all/reward/total",
    "env/all/turns_per_episode",
    "train_mean_nll",
    "dpo_loss",
    "margin",
    "teacher_kl",
    "sdft/mean_teacher_entropy",
    "loss:sum",
)
"""Of the metrics that recipes write, those that are printed."""
Config = dict[str, Any]


def sums(count: int) -> list[tuple[str, str]]:
    """Questions with their answers."""
    numbers = random.Random(0)
    pairs = [(numbers.randint(0, 100), numbers.randint(0, 100)) for _ in range(count)]
    return [(f"What is {x} + {y}?", str(x + y)) for x, y in pairs]


def lines(log: Path, rows: Sequence[Config]) -> str:
    """A JSONL file of these rows."""
    file = log.with_name("data.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def math_rl(config: Config, log: Path, steps: int) -> None:
    """GRPO-like RL on additions."""
    from tinker_cookbook.recipes.math_rl import train

    given = train.CLIConfig(
        **config,
        **ADAPTER,
        loss_fn="importance_sampling",
        group_size=8,
        groups_per_batch=16,
        eval_every=0,
    )
    asyncio.run(train.cli_main(given))


def guess_number(config: Config, log: Path, steps: int) -> None:
    """Games of up to ten turns."""
    from tinker_cookbook.recipes.multiplayer_rl.guess_number import train

    given = train.CLIConfig(**config, batch_size=4, group_size=4, max_tokens=8, eval_every=0)
    asyncio.run(train.train.main(train.build_config(given)))


def twenty_questions(config: Config, log: Path, steps: int) -> None:
    """Games of up to twenty turns; the other player is the base model."""
    import chz
    from tinker_cookbook.completers import TinkerMessageCompleter
    from tinker_cookbook.recipes.multiplayer_rl.twenty_questions import env, train
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    @chz.chz
    class Answered(env.TwentyQuestionsDatasetBuilder):
        def _construct_answer_completer(self, service: Any) -> TinkerMessageCompleter:
            renderer = get_renderer(RENDERER, get_tokenizer(self.answerer_base_model))
            client = service.create_sampling_client(base_model=self.answerer_base_model).result()
            return TinkerMessageCompleter(client, renderer, max_tokens=5)

    given = train.build_config(
        train.CLIConfig(**config, batch_size=2, group_size=4, max_tokens=12, eval_every=0)
    )
    builder = Answered(
        batch_size=2,
        group_size=4,
        model_name_for_tokenizer=config["model_name"],
        renderer_name=RENDERER,
        answerer_base_model=config["model_name"],
    )
    asyncio.run(train.train.main(chz.replace(given, dataset_builder=builder)))


def text_arena(config: Config, log: Path, steps: int) -> None:
    """Tic-tac-toe of the policy against itself."""
    from tinker_cookbook.recipes.multiplayer_rl.text_arena import train

    given = train.CLIConfig(
        **config,
        test_opponent="random",
        batch_size=8,
        num_train_datapoints=8 * steps,
        max_tokens=16,
        eval_every=0,
    )
    asyncio.run(train.train.main(train.build_config(given)))


def shorter(config: Config, log: Path, steps: int) -> None:
    """RL by a preference for the shorter of two answers."""
    from tinker_cookbook.recipes.preference.shorter import train

    train.cli_main(
        train.CLIConfig(**config, batch_size=4, group_size=4, max_tokens=16, eval_every=0)
    )


def chat_sl(config: Config, log: Path, steps: int) -> None:
    """Supervised training on conversations."""
    from tinker_cookbook.recipes.chat_sl import train

    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in sums(16 * steps)
    ]
    train.cli_main(
        train.CLIConfig(**config, **ADAPTER, dataset=lines(log, rows), batch_size=16, eval_every=0)
    )


def dpo(config: Config, log: Path, steps: int) -> None:
    """Preferences of right over wrong sums; in each step the same eight."""
    from tinker_cookbook.preference import train_dpo
    from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
    from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    def said(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    rows = [
        {
            "comparison": {
                "prompt_conversation": [{"role": "user", "content": question}],
                "completion_A": said(answer),
                "completion_B": said(str(int(answer) + 10)),
            },
            "label": "A",
        }
        for question, answer in sums(8)
    ]
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=config["model_name"],
        renderer_name=RENDERER,
        max_length=256,
        batch_size=8,
    )
    builder = DPODatasetBuilderFromComparisons(
        common_config=common,
        comparison_builder=ComparisonBuilderFromJsonl(train_path=lines(log, rows)),
    )
    train_dpo.main(
        train_dpo.Config(
            **_plain(config),
            **ADAPTER | {"learning_rate": 1e-4},
            recipe_name="recipe_preference_dpo",
            dataset_builder=builder,
            num_epochs=steps,
            lr_schedule="constant",
            eval_every=0,
        )
    )


def distillation(config: Config, log: Path, steps: int) -> None:
    """On-policy distillation: the teacher is an adapter that `chat_sl` has trained before."""
    import chz
    from tinker_cookbook.distillation import datasets, train_on_policy
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    taught = log.with_name("teacher")
    chat_sl(config | {"log_path": str(taught)}, taught, steps)
    saved = json.loads((taught / "checkpoints.jsonl").read_text().splitlines()[-1])

    @chz.chz
    class Prompts(datasets.RLDatasetBuilder):
        async def __call__(self) -> tuple[datasets.PromptOnlyDataset, None]:
            tokenizer = get_tokenizer(config["model_name"])
            texts = [question for question, _ in sums(8 * steps)]
            renderer = get_renderer(RENDERER, tokenizer)
            return datasets.PromptOnlyDataset(texts, 8, 4, renderer, tokenizer), None

    teacher = datasets.TeacherConfig(
        base_model=config["model_name"], load_checkpoint_path=saved["sampler_path"]
    )
    dataset = datasets.DistillationDatasetConfig(
        dataset_builder=Prompts(), teacher_config=teacher, groups_per_batch=8
    )
    given = train_on_policy.Config(
        **_plain(config),
        **ADAPTER,
        recipe_name="recipe_distillation_on_policy",
        dataset_configs=[dataset],
        max_tokens=16,
        eval_every=0,
    )
    asyncio.run(train_on_policy.main(given))


def numerics(config: Config, log: Path, steps: int) -> None:
    """`rl_numerics_check`: pages are read with a tool, one a turn. The model must have Qwen's
    <|im_start|> and <|im_end|>; the corpus is this file."""
    import chz
    from tinker_cookbook.recipes.rl_numerics_check import env
    from tinker_cookbook.rl import train

    model, task = (
        config["model_name"],
        env.CountingTaskConfig(num_pages_min=2, num_pages_max=3, page_chars=200),
    )

    @chz.chz
    class Counting(env.RLDatasetBuilder):
        async def __call__(self) -> tuple[env.CountingDataset, None]:
            group = functools.partial(
                env.CountingEnvGroupBuilder,
                task=task,
                model_name_for_tokenizer=model,
                renderer_name="qwen3_instruct",
                group_size=4,
                max_trajectory_tokens=4096,
                max_generation_tokens=64,
            )
            corpus = Path(__file__).read_text()
            return env.CountingDataset(corpus, task, 4, steps, 0, group), None

    given = train.Config(
        **_plain(config) | {"renderer_name": "qwen3_instruct"},
        **ADAPTER,
        recipe_name="recipe_rl_numerics_check",
        dataset_builder=Counting(),
        max_tokens=64,
        eval_every=0,
    )
    asyncio.run(train.main(given))


def rubric(config: Config, log: Path, steps: int) -> None:
    """RL by the marks that the base model gives."""
    from tinker_cookbook.recipes.rubric import train

    item = {
        "rubric_str": "The answer is right.",
        "extraction_regex": r"([0-9])\D*$",
        "grader_output_format_instruction": "Answer with a digit.",
    }
    rows = [
        {"convo": [{"role": "user", "content": question}], "rubric_items": [item]}
        for question, _ in sums(4 * steps)
    ]
    given = train.CLIConfig(
        **config,
        **ADAPTER,
        grader_llm_name=config["model_name"],
        grader_renderer_name=RENDERER,
        train_jsonl_path=lines(log, rows),
        test_jsonl_path=None,
        loss_fn="importance_sampling",
        groups_per_batch=4,
        max_tokens=16,
        eval_every=0,
    )
    asyncio.run(train.cli_main(given))


def sdft(config: Config, log: Path, steps: int) -> None:
    """Self-distillation: the teacher is the base model, which is shown the right answer, and the
    student learns its likeliest tokens."""
    from datasets import Dataset
    from tinker_cookbook.recipes.sdft import train

    rows = [{"prompt": question, "golden_response": answer} for question, answer in sums(8 * steps)]
    folder = log.with_name("rows")
    Dataset.from_list(rows).save_to_disk(str(folder))
    given = train.CLIConfig(
        **config,
        **ADAPTER,
        dataset="toolalpaca",
        toolalpaca_data_path=str(folder),
        groups_per_batch=4,
        max_tokens=16,
        max_context_length=1024,
        eval_every=0,
    )
    asyncio.run(train.cli_main(given))


def _plain(config: Config) -> Config:
    """Without what only commands take."""
    return {key: value for key, value in config.items() if key != "behavior_if_log_dir_exists"}


RECIPES: dict[str, Callable[[Config, Path, int], None]] = {
    recipe.__name__: recipe
    for recipe in (
        math_rl,
        guess_number,
        twenty_questions,
        text_arena,
        shorter,
        chat_sl,
        dpo,
        distillation,
        numerics,
        rubric,
        sdft,
    )
}


def main(recipe: str, url: str, token: str, model: str, steps: str = "4") -> None:
    os.environ["TINKER_BASE_URL"] = url
    os.environ["TINKER_API_KEY"] = Path(token).read_text().split()[0]
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        config = {
            "model_name": model,
            "renderer_name": RENDERER,
            "log_path": str(log),
            "max_steps": int(steps),
            "behavior_if_log_dir_exists": "delete",
        }
        RECIPES[recipe](config, log, int(steps))
        rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    for name in SHOWN:
        if values := [row[name] for row in rows if name in row]:
            print(
                f"{name}: {values[0]} to {values[-1]}, 0.0 in {values.count(0.0)} of {len(values)}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
