"""Valid files, and for a seed one of them damaged and the loader called that reads it."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from isobit.config import load_config, load_sft_config
from isobit.config.load import dump_config, load_compare_config
from isobit.data.dataset import Shaping, read_examples
from isobit.data.readers import Source
from isobit.engine.prompts import encode
from isobit.model import Experts, Model, ModelConfig, RewardModel, Tokenizer
from isobit.model.hub.checkpoint import write_weights

from . import mutate
from .outcome import put_no_file

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is 1 < 2?"}]
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{{- message.content | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
EXTRA: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "bert", [], {}),
    "architectures": ([], "a", [1], None, [None]),
    "rope_scaling": (_ROPE, {**_ROPE, "factor": 10**299}, {**_ROPE, "beta_fast": 0}, {"type": []},
        {"type": "llama3"}),
    "rope_parameters": ({**_ROPE, "factor": None}, {**_ROPE, "rope_theta": 1.0000001},
        {**_ROPE, "beta_fast": -1.0}),
    "sliding_window": (1, 10**9, "a"), "use_sliding_window": (True, "a"),
    "layer_types": (["full_attention"] * 2, [[]]),
    "max_window_layers": (0, 10**9), "mlp_only_layers": ([0, 1], [10**9], list(range(5000))),
    "decoder_sparse_step": (1, 2, 10**9), "num_experts": (0, 10**9, 5),
    "num_local_experts": (5, 10**9),
    "num_hidden_layers": (1, 3, 65536, 10**9), "vocab_size": (1, 10**9),
    "head_dim": (2, 3, 10**9, None),
    "quantization_config": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, [], "a", 1),
    "partial_rotary_factor": (0.5, [], "a"), "per_layer_config": (1, {}),
    "eos_token_id": ([], [[]], 10**20, "a", -1),
    "tie_word_embeddings": (True, False), "attention_bias": (True,), "mlp_bias": (True,),
    "is_causal": (False,),
}  # fmt: skip


def byte_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Tokenizer:
    """A byte-level BPE with chat markup, such as Qwen's, of about 300 tokens; written to the
    folder."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    fast.train_from_iterator(
        ["system user assistant the cat is brief, why is one less than two?"] * 4, trainer
    )
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(fast, settings, [fast.token_to_id("<|im_end|>")], template)
    made.save(folder)
    return made


def write_valid(folder: Path) -> None:
    """The files that are damaged: models in one file, in shards, in MXFP4 and of rewards, data and
    configurations."""
    tokenizer = byte_tokenizer(folder / "tokenizer")
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size, "hidden_size": 16, "intermediate_size": 24,
        "num_layers": 2, "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 8, "max_positions": 64,
    }  # fmt: skip
    dense = ModelConfig(family="qwen3", qk_norm=True, **sizes)
    mixed = ModelConfig(family="qwen3_moe", qk_norm=True, experts=Experts(3, 2, 8), **sizes)
    Model.init(dense, tokenizer, "float32", 0, "reference").save(folder / "dense")
    Model.init(mixed, tokenizer, "float32", 0, "reference").save(
        folder / "mixed", torch.bfloat16, shard_bytes=8000
    )
    wide = {**sizes, "hidden_size": 32, "intermediate_size": 32}
    _write_mxfp4(
        ModelConfig(family="gpt_oss", experts=Experts(3, 2, 32), **wide),
        tokenizer,
        folder / "mxfp4",
    )
    shutil.copytree(folder / "dense", folder / "judge")
    body = load_file(folder / "judge" / "model.safetensors")
    body["score.weight"] = body.pop("lm_head.weight")[:1].clone()
    write_weights(folder / "judge", body)
    rows = [
        {"prompt": f"{i}+1=", "answer": str(i + 1), "level": i, "info": {"tags": ["a", None]}}
        for i in range(4)
    ]
    chats = [{"messages": [*CHAT, {"role": "assistant", "content": "So."}], "score": 0.5}] * 3
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "rows.csv").write_text('prompt,answer\n1+1=,2\n"a, ""b""\nc",3\n')
    model = {"path": str(folder / "dense")}
    train = {
        "model": model,
        "task": {"name": "arithmetic"},
        "rewards": {"functions": ["exact_match"]},
    }
    (folder / "train.yaml").write_text(
        dump_config(load_config({**train, "sampling": {"max_new_tokens": 4}}))
    )
    init = {
        "family": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
    }
    sft = {"model": {"init": init}, "task": {"name": "arithmetic"}, "out": "base"}
    (folder / "sft.yaml").write_text(dump_config(load_sft_config(sft)))
    (folder / "compare.yaml").write_text(
        yaml.safe_dump({"train": "train.yaml", "presets": ["bf16", "fp8"]})
    )


def _write_mxfp4(config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """A gpt-oss whose experts are codes 1 with scales of 1 / 16."""
    Model.init(config, tokenizer, "float32", 0, "reference").save(folder, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name and name.endswith("_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.full(
            (experts, outputs, inputs // 32, 16), 0x11, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.full(
            (experts, outputs, inputs // 32), 123, dtype=torch.uint8
        )
    write_weights(folder, tensors)


def _model(folder: Path) -> None:
    model = Model.load(folder, "float32", "reference")
    _use(model.tokenizer, model.config.vocab_size)


def _use(tokenizer: Tokenizer, vocab_size: int = 1 << 40) -> None:
    encode(["Why is 1 < 2?", CHAT], tokenizer, vocab_size)
    tokenizer.decode_completion(tokenizer.encode("Why"), tokenizer.encode(" not"))


def _judge(folder: Path) -> None:
    RewardModel.load(folder, "float32", "reference").encode(CHAT, "So.")


def _tokenizer(folder: Path) -> None:
    _use(Tokenizer.load(folder))


def _examples(path: Path) -> None:
    read_examples(Source(path), Shaping(chat=len(path.name) % 2 == 0))


def _compare(path: Path) -> None:
    load_compare_config(path, [], None, None)


Load = Callable[[Path], object]
TARGETS: tuple[tuple[str, str, Load, int], ...] = (
    ("dense/config.json", "dense", _model, 3),
    ("mixed/config.json", "mixed", _model, 3),
    ("mixed/model.safetensors.index.json", "mixed", _model, 2),
    ("dense/model.safetensors", "dense", _model, 2),
    ("mixed/model-00001-of-*", "mixed", _model, 1),
    ("dense/generation_config.json", "dense", _model, 1),
    ("mxfp4/config.json", "mxfp4", _model, 1),
    ("mxfp4/model.safetensors", "mxfp4", _model, 2),
    ("judge/config.json", "judge", _judge, 1),
    ("judge/model.safetensors", "judge", _judge, 1),
    ("tokenizer/tokenizer.json", "tokenizer", _tokenizer, 4),
    ("tokenizer/tokenizer_config.json", "tokenizer", _tokenizer, 3),
    ("tokenizer/chat_template.jinja", "tokenizer", _tokenizer, 1),
    ("train.yaml", "train.yaml", load_config, 3),
    ("sft.yaml", "sft.yaml", load_sft_config, 2),
    ("compare.yaml", "compare.yaml", _compare, 1),
    ("rows.jsonl", "rows.jsonl", _examples, 3),
    ("chats.jsonl", "chats.jsonl", _examples, 3),
    ("rows.json", "rows.json", _examples, 1),
    ("rows.csv", "rows.csv", _examples, 2),
)
"""What is damaged, what the loader is given, the loader, and how often it is drawn."""


def run(folder: Path, seed: int) -> str:
    """Damage one file as the seed says, call its loader, and put the file back; returns what was
    damaged. Raises what the loader raises."""
    rng = random.Random(seed)
    pattern, given, load, _ = rng.choices(TARGETS, [target[3] for target in TARGETS])[0]
    file = next(iter(folder.glob(pattern)), folder / pattern)
    before = file.read_bytes() if file.is_file() else None
    try:
        _damage(file, before or TEMPLATE.encode(), rng)
        load(folder / given)
    finally:
        file.unlink(missing_ok=True) if not file.is_dir() or file.is_symlink() else file.rmdir()
        if before is not None:
            file.write_bytes(before)
    return pattern


def _damage(file: Path, before: bytes, rng: random.Random) -> None:
    kind = rng.random()
    if kind < 0.02:
        file.unlink(missing_ok=True)
        put_no_file(file, rng)
        return
    if kind < 0.25 and file.suffix != ".jinja":
        content = mutate.data(before, rng)
    else:
        content = _structured(file, before, rng)
    file.write_bytes(content)


def _structured(file: Path, before: bytes, rng: random.Random) -> bytes:
    times, extra = rng.choice((1, 1, 1, 2, 5)), EXTRA if file.name == "config.json" else None
    if file.suffix == ".safetensors":
        size = int.from_bytes(before[:8], "little")
        header = _times(json.loads(before[8 : 8 + size]), times, rng, None)
        codes = mutate.dumped(header).encode("utf-8", "replace")
        return len(codes).to_bytes(8, "little") + codes + before[8 + size :]
    text = before.decode()
    if file.suffix == ".yaml":
        return _yaml(text, times, rng)
    if file.suffix == ".jsonl":
        rows = _times([json.loads(line) for line in text.splitlines()], times, rng, None)
        lines = (
            [mutate.dumped(row) for row in rows]
            if isinstance(rows, list)
            else [mutate.dumped(rows)]
        )
        return "\n".join(lines).encode("utf-8", "replace")
    if file.suffix == ".csv":
        return mutate.put(
            text.replace(
                rng.choice("123,\n"), rng.choice(("", '"', "\0", ",", "\n\n", "9" * 5000, "\r")), 1
            )
        ).encode()
    if file.suffix == ".jinja":
        if rng.random() < 0.1:
            return rng.choice(mutate.TEMPLATES).encode()
        cut = rng.randrange(len(text))
        words = (
            "{{",
            "}}",
            "{%",
            "%}",
            "messages",
            "| tojson",
            "| batch(99999)",
            ".role",
            "0",
            " * 9",
            "~",
            "for",
            "'",
        )
        return (text[:cut] + rng.choice(words) + text[cut + rng.choice((0, 1, 5)) :]).encode()
    tree = json.loads(text)
    if file.name == "tokenizer_config.json" and rng.random() < 0.02:
        return json.dumps({**tree, "chat_template": rng.choice(mutate.TEMPLATES)}).encode()
    return mutate.dumped(_times(tree, times, rng, extra), rng.choice((None, 1))).encode(
        "utf-8", "replace"
    )


_NAMES = list(zip("abcdefgh", "bcdefghi"))
_YAML = (
    "a: &a [x, x]\n" + "".join(f"{b}: &{b} [" + f"*{a}, " * 9 + "]\n" for a, b in _NAMES),
    "a: &a {k: v}\n" + "".join(f"{b}: &{b} {{<<: [" + f"*{a}, " * 9 + "]}\n" for a, b in _NAMES),
    "a: &a [*a]\n", "a: &a {b: *a}\n", "steps: " + "[" * 5000, "steps: " + "{a: " * 5000,
        "- " * 3000,
    "steps: 0x" + "f" * 50_000 + "\n", "steps: 2026-99-99\n", "steps: !!int a\n",
    "a: !!python/object:os.system a\n",
    "steps: !!timestamp a\n", "steps: !!binary é\n", "? [a]\n: 1\n", "steps: 1" + ":59" * 5000,
    "--- a\n--- b\n",
    "".join(f"a{i}: &a{i} [{'*a' + str(i - 1) if i else 1}]\n" for i in range(3000)), "\x07",
    "%YAML 9.9\n---\na: 1",
    "steps: !!float a\n", "steps: !!bool a\n", "steps: !!omap [a]\n", "steps: !!set {a, b}\n",
    "!!map [a]\n", "<<: 1\n",
)  # fmt: skip


def _yaml(text: str, times: int, rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(_YAML).encode()
    if kind < 0.2:
        lines = text.splitlines(keepends=True)
        return "".join([*lines[: rng.randrange(len(lines))], rng.choice(_YAML)]).encode()
    tree = _times(yaml.safe_load(text), times, rng, None)
    return mutate.put(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)).encode(
        "utf-8", "replace"
    )


def _times(
    tree: Any, times: int, rng: random.Random, extra: dict[str, tuple[Any, ...]] | None
) -> Any:
    for _ in range(times):
        tree = mutate.value(tree, rng, extra)
    return tree
