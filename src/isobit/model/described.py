"""What a model's directory holds: its config and tokenizer alone, or its weights too."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from isobit.data.foreign import exists
from isobit.distributed import Ranks
from isobit.errors import IsobitError
from isobit.model.adapters.low_rank import Adapter
from isobit.model.adapters.peft import base_of, brings_tokenizer, is_adapter, read_peft
from isobit.model.adapters.targets import NewAdapter, new_adapter
from isobit.model.divided.by_rows import layout_of
from isobit.model.hub import names
from isobit.model.hub.checkpoint import model_folder, open_weights, read_json
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.whole import Whole
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


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of a directory: of the masters, the rows that a rank keeps; with an adapter all,
    one at a time."""

    config: ModelConfig
    tokenizer: Tokenizer
    masters: Mapping[str, Tensor]
    generation: dict[str, object]
    adapter: Adapter | None
    directory: Path
    beyond: Mapping[str, Tensor]
    whole: Whole | None


def read_directory(
    directory: Path,
    adapter: str | Path | NewAdapter | None,
    ranks: Ranks,
    device: torch.device,
    files: ExitStack,
    dtype: torch.dtype,
    rules: TextRules,
    vocabulary: int | None,
    divided: int = 1,
) -> Contents:
    """Read a directory. The `files` of a model whose adapter is trained stay open; if `divided`
    ranks hold it together, only this rank's rows are read of it."""
    if is_adapter(directory):
        if adapter is not None:
            raise IsobitError(
                f"{directory} is an adapter itself; give the model that another one is for"
            )
        directory, adapter = base_of(directory), directory
    config = ModelConfig.from_hf(
        read_json(directory / "config.json"), str(directory / "config.json")
    )
    where, model_path = str(directory), directory
    weights = files.enter_context(
        open_weights(directory, lambda shapes: names.check_shapes(shapes, config, where))
    )
    names.check_tied(weights.rows, weights.shapes, config, where, ranks)
    beyond: Mapping[str, Tensor] = {}
    if vocabulary is not None and vocabulary < config.vocab_size:
        beyond = names.beyond(weights.rows, config, vocabulary)
        config = replace(config, vocab_size=vocabulary)
    factors = None
    if isinstance(adapter, NewAdapter):
        factors = new_adapter(config, adapter, str(directory.resolve()))
    elif adapter is not None:
        folder = model_folder(adapter, "adapter")
        factors = read_peft(folder, config, str(directory.resolve()))
        model_path = folder if brings_tokenizer(folder) else model_path
    tokenizer = Tokenizer.load(model_path, rules)
    masters: Mapping[str, Tensor]
    if factors is None:
        masters = names.fuse(weights.rows, config, ranks, dtype, weights.shapes)
    else:
        layout = None if divided == 1 else layout_of(config, divided)
        read = weights.rows, config, device, weights.shapes
        masters = names.Fused(*read, layout, ranks.rank % divided)
    more = model_path / "generation_config.json"
    generation = read_json(more) if exists(more) else {}
    whole = Whole.read(directory, weights) if config.wrapped and factors is None else None
    return Contents(config, tokenizer, masters, generation, factors, directory, beyond, whole)


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
