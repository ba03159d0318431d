"""A small reward model of your own: a model's body, and a score that prefers right sums.

isobit sft configs/quickstart-sft.yaml
python examples/reward_model.py runs/quickstart-base runs/reward-model
"""

import json
import random
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from isobit.kernels import Layout
from isobit.model import RewardModel
from isobit.run.directory import model_directory

TRAINED, HELD_OUT, RIDGE = 2048, 512, 1.0


def pairs(count: int) -> list[tuple[str, str]]:
    """Right sums, each with one that has a wrong digit. Put your own pairs here."""
    draw = random.Random(0)
    made = []
    for _ in range(count):
        a, b = draw.randint(100, 499), draw.randint(100, 499)
        right = str(a + b)
        place, digit = draw.randrange(len(right)), draw.randint(1, 9)
        other = str((int(right[place]) + digit) % 10)
        wrong = right[:place] + other + right[place + 1 :]
        made.append((f"{a}+{b}={right}", f"{a}+{b}={wrong}"))
    return made


def features(model: RewardModel, texts: list[str]) -> torch.Tensor:
    """The last hidden state at the last token of each text."""
    sequences = [model.encode("", text) for text in texts]
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = [len(sequence) for sequence in sequences]
    with torch.no_grad():
        hidden = model.transformer.hidden(tokens, Layout.packed(lengths), use="learner")
    return hidden[torch.tensor(lengths).cumsum(0) - 1].double().cpu()


def main(base: str, out: str) -> None:
    source = model_directory(Path(base))  # of a run its newest checkpoint
    moments = shutil.ignore_patterns("trainer", "manifest.json")
    shutil.copytree(source, out, ignore=moments, dirs_exist_ok=True)
    folder = Path(out)
    config = json.loads((folder / "config.json").read_text())
    family = config["architectures"][0].removesuffix("ForCausalLM")
    config |= {"architectures": [f"{family}ForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    score = torch.zeros(1, config["hidden_size"])
    save_file(tensors | {"score.weight": score}, folder / "model.safetensors")

    model = RewardModel.load(folder, "fp8")
    right, wrong = zip(*pairs(TRAINED + HELD_OUT))
    difference = features(model, list(right)) - features(model, list(wrong))
    fitted, held_out = difference[:TRAINED], difference[TRAINED:]
    gram = fitted.T @ fitted + RIDGE * torch.eye(score.shape[1], dtype=torch.float64)
    direction = torch.linalg.solve(gram, fitted.sum(0))
    score = direction[None].float()
    save_file(tensors | {"score.weight": score}, folder / "model.safetensors")
    share = (held_out @ direction > 0).double().mean().item()
    print(f"{out}: prefers the right sum in {share:.2f} of {HELD_OUT} pairs not fitted")


if __name__ == "__main__":
    main(*sys.argv[1:])
