"""A model without its weights: what its config.json and its tokenizer's files say."""

from dataclasses import dataclass
from pathlib import Path

from isobit.errors import IsobitError
from isobit.model.adapters.peft import base_of, brings_tokenizer, is_adapter
from isobit.model.hub.checkpoint import model_folder, read_json
from isobit.model.hub.config import ModelConfig
from isobit.model.text.tokenizer import DEFAULT_RULES, TextRules, Tokenizer


@dataclass(frozen=True, eq=False)
class Described:
    """The parts of a model that are needed to read a prompt and to plan memory."""

    config: ModelConfig
    tokenizer: Tokenizer


def described(
    path: str | Path, adapter: str | None = None, rules: TextRules = DEFAULT_RULES
) -> Described:
    """Read the config and the tokenizer of a Hugging Face directory, or of the model that a PEFT
    folder names; the tokenizer is that of the `adapter` folder, where it brings one. Raises
    IsobitError for whatever is wrong with the files."""
    base = model_folder(path)
    folder = base_of(base) if is_adapter(base) else base
    config = ModelConfig.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
    if adapter is not None:
        base = model_folder(adapter, "adapter")
    tokenizer = Tokenizer.load(base if base != folder and brings_tokenizer(base) else folder, rules)
    check_vocabulary(config, tokenizer)
    return Described(config, tokenizer)


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer, where: str = "") -> None:
    """Raise IsobitError where the tokenizer has ids that the model does not have."""
    if tokenizer.vocab_size > config.vocab_size:
        raise IsobitError(
            f"{where}the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model's vocabulary "
            f"ends at {config.vocab_size - 1}"
        )
    if outside := [token for token in tokenizer.eos_ids if not 0 <= token < config.vocab_size]:
        raise IsobitError(
            f"{where}end-of-sequence id {outside[0]} is not in the model's vocabulary of "
            f"{config.vocab_size}"
        )
