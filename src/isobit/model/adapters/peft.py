"""PEFT's folders of an adapter: adapter_model.safetensors and adapter_config.json, read and
written, in FP32.

Names are PEFT's (`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`), so `peft` loads
what is written here, and its folders load here (`tests/model/test_peft.py`). They are those of the
modules of the base's own class: for a model that reads images too, `model.language_model.layers.0`
(`tests/model/test_wrapped_adapters.py`). Keys of an adapter's config.json other than rank and alpha
are accepted only where they change nothing; the rest is refused by name. Left out: the arithmetic
(`low_rank.py`).
"""

import filecmp
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.data.foreign import exists
from isobit.distributed import Ranks, Shards
from isobit.distributed.files import Part, write_file
from isobit.errors import IsobitError, brief
from isobit.model.adapters.low_rank import Adapter, Projection
from isobit.model.adapters.peft_experts import apart, config_of, form_of, joined
from isobit.model.adapters.targets import held_together, is_renamed, projections
from isobit.model.families import FAMILIES, flag
from isobit.model.hub.checkpoint import (
    Shapes,
    Weights,
    model_folder,
    open_weights,
    read_json,
    write_json,
)
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.folders import from_hub_cache
from isobit.model.hub.wrapped import ALONE, classes_of, prefix_of, renamed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_BESIDE = r"(?!model\.(language_model\.)?layers\.).*"
"""The modules of a model that reads images outside its language model's layers: its towers have
projections of the same names."""
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules that are trained whole",
    "fan_in_fan_out": "transposed weights",
    "lora_bias": "biases",
    "layer_replication": "layers that are repeated",
    "trainable_token_indices": "trained tokens",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""Keys of adapter_config.json that change what an adapter computes, and what they stand for."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that write into the base model; without that change the factors mean something
else."""


def is_adapter(directory: Path) -> bool:
    """Return whether a directory is an adapter's and not a model's."""
    return exists(directory / CONFIG) and not exists(directory / "config.json")


def brings_tokenizer(directory: Path) -> bool:
    """Return whether the folder of an adapter has a tokenizer, with the tokens that end a sequence,
    as `Model.save` writes it."""
    return exists(directory / "tokenizer.json") and exists(directory / "generation_config.json")


def base_of(directory: Path) -> Path:
    """Return the directory of the model that an adapter's directory names. Raises IsobitError if it
    names none, or one that is not here."""
    base = read_json(directory / CONFIG).get("base_model_name_or_path")
    if isinstance(base, str) and base and exists(folder := from_hub_cache(Path(base))):
        return model_folder(folder)
    raise IsobitError(
        f"{directory}: its model {base or '(base_model_name_or_path is missing)'} is not here; "
        "give the model's "
        "directory, and this one as its adapter (--adapter, or Model.load(path, adapter=...))"
    )


def check_served(directory: Path, base: Path | None) -> None:
    """Raise IsobitError for a directory that no model at `base` can serve: a whole model, or an
    adapter of another model that is here too. A copy of `base` is not another model; where the
    model that the adapter names has moved, nothing can be said, and the adapter is accepted."""
    if exists(directory / "config.json") and not exists(directory / CONFIG):
        raise IsobitError(
            f"adapter {directory}: a whole model, merged or never adapted; give it as the model "
            "itself"
        )
    _require_config(directory)
    named = read_json(directory / CONFIG).get("base_model_name_or_path")
    if base is None or not isinstance(named, str) or not named:
        return
    named_base = from_hub_cache(Path(named))
    if not exists(named_base):
        return
    if named_base.resolve() != base.resolve() and not _same_weights(named_base, base):
        raise IsobitError(f"adapter {directory}: of the model {named_base}, whose weights are not "
            f"those of {base}; "
                          "serve each beside its own")  # fmt: skip


def _require_config(directory: Path) -> None:
    if not exists(directory / CONFIG):
        raise IsobitError(
            f"adapter {directory}: no {CONFIG} in it; expected a PEFT folder, such as a checkpoint "
            "of a run that trained an adapter (RUN/checkpoints/step-...)"
        )


def _same_weights(first: Path, second: Path) -> bool:
    """Return whether two models' files of weights are the same bytes."""
    names = [
        sorted(path.name for path in folder.glob("*.safetensors")) for folder in (first, second)
    ]
    same = names[0] == names[1] and all((first / name).stat().st_size == (second / name).stat().st_size
                                        for name in names[0])  # fmt: skip
    return same and all(
        filecmp.cmp(first / name, second / name, shallow=False) for name in names[0]
    )


def read_peft(directory: Path, config: ModelConfig, base: str = "") -> Adapter:
    """Read the adapter of a directory, for a model of this architecture at `base`. Raises
    IsobitError for files that are missing or damaged, for what is not supported, and for factors
    that do not fit the model."""
    _require_config(directory)
    values = read_json(directory / CONFIG)
    rank, alpha, rslora = _settings(values, directory / CONFIG)
    form, together = form_of(values, directory / CONFIG), held_together(config)
    with open_weights(directory, name=WEIGHTS) as opened:
        weights = _of_language_model(opened, config, directory)
        experts = [proj for proj in projections(config) if form.roles and proj.expert is not None]
        keys = {proj: _own_keys(proj) for proj in experts}
        shapes, read = apart(weights, keys, rank, form, together, _PREFIX)
        chosen = _adapted(shapes, config, rank, directory)
        tensors = {name: read(key) for proj in chosen for name, key in _keys(proj).items()}
    return Adapter(
        rank,
        alpha,
        tuple(chosen),
        tensors,
        base,
        rslora,
        together,
        classes_of(config.wrapped, FAMILIES[config.family]),
        is_renamed(config),
    )


def _of_language_model(weights: Weights, config: ModelConfig, directory: Path) -> Weights:
    """Return the factors by the names of the language model alone. A folder for a model around it
    may have those names too: in place of the model's own, as isobit wrote them before, or in
    addition to them. Raises IsobitError for other names of two classes, and for names inside
    another model where the base is a language model alone."""
    factors: dict[str, dict[str, str]] = {}  # by how names begin: names alone, and in the folder
    outside: list[str] = []
    for key in weights.shapes:
        name = key.removeprefix(_PREFIX)
        if key.startswith(_PREFIX) and (prefix := prefix_of(name)):
            factors.setdefault(prefix, {})[_PREFIX + renamed(name, ALONE)] = key
        else:
            outside.append(key)
    if not factors:
        return weights
    classes = classes_of(config.wrapped, FAMILIES[config.family])
    if not config.wrapped and (inside := next((p for p in factors if p != ALONE), None)):
        raise IsobitError(
            f"{directory}: tensor {brief(min(factors[inside].values()))} is named as inside a model "
            f"that reads images too, and this {config.family} is the language model alone: "
            f"expected {_PREFIX}{ALONE}layers..."
        )
    first, *again = (factors[prefix] for prefix in sorted(factors, key=len, reverse=True))
    for copy in again:
        if factors.keys() != {*classes} or not _same_factors(weights, first, copy):
            raise IsobitError(
                f"{directory}: tensors {brief(min(first.values()))} and "
                f"{brief(min(copy.values()))} are named as of two classes of models; expected those "
                f"of the base's own class, {_PREFIX}{classes[0]}layers..."
            )
    chosen = {key: name for name, key in first.items()} | {key: key for key in outside}
    return weights.renamed(chosen)


def _same_factors(weights: Weights, first: Mapping[str, str], copy: Mapping[str, str]) -> bool:
    """Return whether a folder has the same factors by two names each."""
    return first.keys() == copy.keys() and all(
        weights.shapes[key] == weights.shapes[copy[name]]
        and torch.equal(weights.rows(key), weights.rows(copy[name]))
        for name, key in first.items()
    )


def write_peft(
    directory: Path, adapter: Adapter, masters: Mapping[str, Tensor], ranks: Ranks
) -> None:
    """Write an adapter's two files; each rank writes the rows of the `masters` that it keeps, and
    the first rank the rest. Raises OSError if a file cannot be written."""
    shards = Shards.of(adapter.shapes, ranks)
    tensors = {} if adapter.together is None else joined(adapter, masters, shards, _PREFIX)
    for proj in _apart_in_files(adapter):
        for name, key in _keys(proj).items():
            lo = shards.own(name)[0] if shards.owned(name) else 0
            start = lo * shards.width(name)
            tensors[key] = Part(torch.float32, shards.shapes[name], masters.get(name), start)
    tensors = {
        _PREFIX + renamed(key.removeprefix(_PREFIX), prefix): factor
        for prefix in adapter.classes
        for key, factor in tensors.items()
    }
    ranks.on_first(lambda: write_json(directory / CONFIG, _config(adapter)))
    write_file(directory / WEIGHTS, tensors, ranks)


def _config(adapter: Adapter) -> dict[str, Any]:
    alpha = adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(adapter),
        **({} if adapter.classes == (ALONE,) else {"exclude_modules": _BESIDE}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": adapter.rslora,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
        **({} if adapter.together is None else config_of(adapter, _by_parameter(adapter))),
    }


def _apart_in_files(adapter: Adapter) -> list[Projection]:
    """Return the matrices whose factors are separate tensors in a folder."""
    together = adapter.together is not None
    return [proj for proj in adapter.projections if not together or proj.expert is None]


def _by_parameter(adapter: Adapter) -> list[Projection]:
    """Return the matrices outside the experts that PEFT would take for the experts' own, by the
    ends of their names. Named by their parameter they have the same factors."""
    return [
        proj
        for proj in _apart_in_files(adapter)
        if adapter.renamed and proj.name.rpartition(".")[2] in _OF_EXPERTS
    ]


def _target_modules(adapter: Adapter) -> list[str]:
    """Return the ends of the modules' names; whole names where an end is found in some layers only,
    as that of dense layers among layers with experts, or is that of experts too."""
    layers: dict[str, set[str]] = {}
    apart = _apart_in_files(adapter)
    if adapter.together is not None:
        beside = set(_by_parameter(adapter))
        apart = [proj for proj in apart if proj not in beside]
    for proj in apart:
        layers.setdefault(proj.name.rpartition(".")[2], set()).add(proj.name.split(".")[1])
    if not apart:
        return []
    if (
        adapter.experts and adapter.together is None
    ):  # PEFT asks for ends, and takes them for the experts' own
        return list(layers)
    most = max(map(len, layers.values()))
    modules = (proj.name.rpartition(".")[2] for proj in apart)
    beside_experts = any(".shared." in proj.name for proj in apart)
    if all(len(names) == most for names in layers.values()) and not beside_experts:
        return list(dict.fromkeys(modules))
    return [
        proj.module.removeprefix("" if adapter.classes == (ALONE,) else ALONE) for proj in apart
    ]


def _keys(projection: Projection) -> dict[str, str]:
    """Return the names of A and B here, each with its name in a file."""
    return {
        name: f"{_PREFIX}{projection.module}.{name.rpartition('.')[2]}.weight"
        for name in projection.masters
    }


def _own_keys(projection: Projection) -> tuple[str, str]:
    a, b = _keys(projection).values()
    return a, b


def _settings(values: Mapping[str, Any], path: Path) -> tuple[int, float, bool]:
    """Return (rank, alpha, whether it is rsLoRA). Raises IsobitError for any other kind of adapter
    that an adapter's config.json asks for."""
    if values.get("peft_type") != "LORA":
        raise IsobitError(
            f"{path}: peft_type is {brief(repr(values.get('peft_type')))}; only LORA is read"
        )
    for key, kind in _REFUSED.items():
        if values.get(key):
            raise IsobitError(f"{path}: {key}: {kind} cannot be read; only plain LoRA adapters are")
    if values.get("bias", "none") != "none":
        raise IsobitError(f"{path}: bias: trained biases cannot be read; only bias: none is")
    if str(values.get("init_lora_weights", True)).lower().startswith(_CHANGES_BASE):
        raise IsobitError(
            f"{path}: init_lora_weights: {values['init_lora_weights']} changes the base model; "
            "save the adapter as plain LoRA (PEFT: path_initial_model_for_weight_conversion)"
        )
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise IsobitError(
            f"{path}: r: expected a whole number, at least 1, got {brief(repr(rank))}"
        )
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise IsobitError(
            f"{path}: lora_alpha: expected a number above 0, got {brief(repr(alpha))}"
        )
    return rank, float(alpha), flag(values, "use_rslora", str(path))


def _adapted(shapes: Shapes, config: ModelConfig, rank: int, directory: Path) -> list[Projection]:
    """Return the projections whose factors these tensors are. Raises IsobitError for tensors that
    are not factors, and for factors that do not fit."""
    chosen, known = [], set[str]()
    for proj in projections(config):
        a, b = _keys(proj).values()
        if a not in shapes and b not in shapes:
            continue
        for key, shape in ((a, (rank, proj.inputs)), (b, (proj.hi - proj.lo, rank))):
            if key not in shapes:
                raise IsobitError(f"{directory}: tensor {key} is missing; A and B belong together")
            if shapes[key] != shape:
                raise IsobitError(f"{directory}: tensor {key} has shape {shapes[key]}, but the "
                    "model and r ask for "
                                  f"{shape}")  # fmt: skip
        chosen.append(proj)
        known |= {a, b}
    _check_experts(chosen, config, directory)
    if unknown := shapes.keys() - known:
        raise IsobitError(
            f"{directory}: tensor {brief(min(unknown))} is no factor of a linear layer of this "
            f"{config.family} model; adapters of embeddings, heads and routers are not read"
        )
    if not chosen:
        raise IsobitError(f"{directory}: {WEIGHTS} holds no tensors")
    return chosen


def _check_experts(chosen: Sequence[Projection], config: ModelConfig, directory: Path) -> None:
    """Raise IsobitError unless all experts of a layer have factors of the same matrices."""
    wanted = 0 if config.experts is None else config.experts.count
    counts = Counter(proj.expert[0] for proj in chosen if proj.expert is not None)
    for group, count in counts.items():
        if count != wanted:
            raise IsobitError(
                f"{directory}: {count} of {wanted} experts have factors of {group}; adapters of "
                "some experts are not read, only of all of a layer"
            )
