"""The memory plan by shapes: as large as the one counted from tensors, and there before a weight is read."""

import json
import math
import re
import resource
import string
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.model import ModelConfig
from isobit.model.hub.names import parts as parts_of
from isobit.plan.memory import num_parameters
from isobit.training.memory.forecast import forecast
from isobit.training.memory.plan import measure_parts, plan
from isobit.training.session.assembly import open_parts
from tests.models import tiny_model
from tests.runs import write_config

GIB = 2**30
RUNS = [
    ("fp8", "qwen3", ()),
    ("bf16", "llama", ("consistency=fast",)),
    ("fp8-rollout", "qwen3", ("algorithm.kl_coefficient=0.1",)),
    ("fp8", "qwen3_moe", ()),
    ("fp8", "qwen3_5_text", ("evaluation.every=1", "evaluation.samples=4")),
    ("fp8", "gemma3_text", ("optimizer.masters=bf16", "optimizer.state=8bit")),
    ("fp8", "qwen3", ("optimizer.activation_checkpointing=true", "sampling.top_k=5")),
    ("bf16", "qwen3", ("optimizer.micro_batch_tokens=64", "prompts_per_step=32", "algorithm.updates_per_batch=2")),
]


@pytest.mark.parametrize(("flow", "family", "changes"), RUNS)
def test_it_is_what_the_tensors_say(flow: str, family: str, changes: tuple[str, ...], tmp_path: Path) -> None:
    """To a tenth; the controls are other settings."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 6, "num_heads": 4, "head_dim": 64}
    tiny_model(family=family, alphabet=string.printable, **sizes).save(tmp_path / "model")
    config = load_config(write_config(tmp_path, tmp_path / "model"), (f"precision={flow}", *changes))
    parts = open_parts(config, quiet=True)
    parts.rewards.close()
    counted = plan(parts, measure_parts(parts), 0, parts.micro_batch_tokens)
    given = parts.model.config, parts.engine.longest_prompt, parts.model.ops, 0
    foreseen = forecast(config, *given).plan()
    assert foreseen.total == pytest.approx(counted.total, rel=0.1)
    assert [label for label, _ in (*foreseen.held, *foreseen.parts)] == [
        label for label, _ in (*counted.held, *counted.parts)
    ]
    other = "8bit" if config.optimizer.state == "fp32" else "fp32"
    changed = load_config(config, [f"optimizer.state={other}"])
    assert forecast(changed, *given).plan().total != pytest.approx(counted.total, rel=0.1)


def test_ranks_share_what_they_can(tmp_path: Path) -> None:
    model = tiny_model(hidden_size=256, intermediate_size=768, num_layers=6)
    model.save(tmp_path / "model")
    path = write_config(tmp_path, tmp_path / "model")
    one, four = (forecast(load_config(path, [f"ranks={n}"]), model.config, 4, model.ops, 0) for n in (1, 4))
    alone, each = dict(one.plan().held), dict(four.plan().held)
    assert each["AdamW moments"] == pytest.approx(alone["AdamW moments"] / 4, rel=0.1)
    assert each["working weights, rollout"] == alone["working weights, rollout"]
    assert four.limit == one.limit // 4


QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
DRIVER = """
import resource, sys
from isobit.training.memory import forecast, plan
for module in (forecast, plan):
    module.memory_limit = lambda device: ({limit}, "memory of this machine")
from isobit import cli
sys.argv = ["isobit", *{arguments!r}]
try:
    cli.main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
"""


def eight_billion(folder: Path) -> Path:
    """Qwen3-8B as a directory whose file of weights has a header, and no bytes on the disk behind it."""
    folder.mkdir()
    tiny_model(alphabet=string.printable).tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    header, end = {}, 0
    config = ModelConfig.from_hf(QWEN3_8B, "config.json")
    for name, shape in (tensor for _, tensors in parts_of(config) for tensor in tensors):
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="peaks in KiB, and sparse files, are Linux's")
def test_a_dry_run_plans_eight_billion_parameters_where_they_do_not_fit(tmp_path: Path) -> None:
    """The table comes, with what does not fit and what would lower it; no weight is read, so the process stays small,
    where the weights alone are 16 GB. The control is a machine on which they would fit, whose dry run reads them."""
    model = eight_billion(tmp_path / "model")
    config = write_config(tmp_path, model)

    def run(limit: int, most: int | None) -> subprocess.CompletedProcess[str]:
        driver = DRIVER.format(limit=limit, arguments=["train", str(config), "--dry-run"])
        bound = None if most is None else (lambda: resource.setrlimit(resource.RLIMIT_DATA, (most, most)))
        return subprocess.run(
            [sys.executable, "-c", driver], capture_output=True, text=True, timeout=300, preexec_fn=bound
        )

    small = run(40 * GIB, 3 * GIB)
    *said, peak = small.stderr.strip().splitlines()
    assert small.returncode != 0
    assert int(peak) < 1.5 * GIB
    table, line = small.stdout.split("memory by config.json")[1].split("does not fit: ")
    parameters = num_parameters(ModelConfig.from_hf(QWEN3_8B, "config.json"))
    assert re.search(rf"^FP32 masters +{4 * parameters / 2**20:.1f} MiB$", table, re.M)
    assert "optimizer.state=8bit" in line
    assert "first prompt" in line
    assert len(said) == 1
    assert "the rest of the check, which needs them, is left out" in said[0]
    large = run(400 * GIB, 3 * GIB)
    assert "fits: " in large.stdout
    assert large.returncode != 0, "the control: reading the weights takes more than the process may"
