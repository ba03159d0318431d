"""The messages between a run and its engines: bytes only. Requests, results and facts are JSON,
weights are buffers.

Log-probabilities are float32 widened to Python floats, whose JSON reads back as the same float.
Weights have a SHA-256 of each buffer, which the receiver computes again. Left out: when each is sent
(`fleet.py`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from tokenizers import Tokenizer as FastTokenizer

from isobit.engine.engine import Engine
from isobit.engine.prompts import check_plain
from isobit.engine.types import Completion, EngineSize, Sampling
from isobit.errors import RunFailed
from isobit.kernels import computed_by, get_ops
from isobit.model import Model, ModelConfig, Tokenizer
from isobit.model.forward.kv_scales import KVScales
from isobit.model.transformer import Transformer
from isobit.precision import precision_from
from isobit.run.source import source_digest


@dataclass(frozen=True, eq=False)
class Weights:
    """A version of the rollout's weights on its way: where each buffer is, its digest, and the
    scales of a calibrated KV cache [layers, 2 or 3]. `references` are Ray's, by buffer."""

    version: int
    digests: Mapping[str, str]
    scales: list[list[float]] | None
    references: Mapping[str, Any]

    def manifest(self) -> bytes:
        """Return everything but the references, as JSON."""
        return to_bytes({"version": self.version, "digests": self.digests, "scales": self.scales})


def to_bytes(value: Any) -> bytes:
    """Encode plain values as JSON."""
    return json.dumps(value).encode()


def from_bytes(data: bytes) -> Any:
    """Decode what `to_bytes` encoded."""
    return json.loads(data)


def digest(buffer: Any) -> str:
    """Return the SHA-256 of an array's bytes, in hexadecimal."""
    return hashlib.sha256(buffer).hexdigest()


def check_digest(name: str, buffer: Any, expected: str, version: int) -> None:
    """Raise RunFailed if a buffer is not what was sent."""
    if (computed := digest(buffer)) != expected:
        raise RunFailed(
            f"{name} of version {version} of the weights arrived with other bytes: SHA-256 "
            f"{computed[:12]}..., sent was {expected[:12]}..."
        )


def facts(model: Model) -> dict[str, str]:
    """Return what can change a bit in this process: versions, device, source. An engine's facts
    must equal the learner's."""
    return computed_by(model.ops) | {
        "device": model.ops.device.type,
        "isobit's source": source_digest(),
    }


def describe(
    engine: Engine, sequences: int, max_new_tokens: int, size: EngineSize, check_memory: bool
) -> bytes:
    """Return a description, as JSON, from which another process makes an engine like this one;
    without its weights.

    The engine samples `sequences` at a time, of at most `max_new_tokens` new tokens.
    `check_memory`: it compares its weights with what arrived before it returns groups.
    """
    model = engine.model
    tokenizer = model.tokenizer
    assert precision_from(model.precision.name) == model.precision
    return to_bytes(
        {
            "config": model.config.to_hf(),
            "tokenizer": tokenizer.fast.to_str(),
            "eos_ids": tokenizer.eos_ids,
            "settings": tokenizer.settings,
            "precision": model.precision.name,
            "backend": model.ops.backend,
            "consistency": model.ops.consistency,
            "longest_prompt": engine.longest_prompt,
            "record_routes": engine.record_routes,
            "sequences": sequences,
            "max_new_tokens": max_new_tokens,
            "size": _fields(EngineSize, size),
            "check_memory": check_memory,
        }
    )


def described_engine(description: bytes) -> Engine:
    """Make the engine of a description, whose weights are NaN until they arrive."""
    spec = from_bytes(description)
    config = ModelConfig.from_hf(spec["config"], "the model's config")
    tokenizer = Tokenizer(
        FastTokenizer.from_str(spec["tokenizer"]), spec["settings"], spec["eos_ids"], None
    )
    ops = get_ops(spec["backend"], spec["consistency"])
    model = Model(Transformer(config, precision_from(spec["precision"]), ops, None), tokenizer)
    longest = [[0] * max(spec["longest_prompt"], 1)]
    size = EngineSize(**spec["size"])
    engine = Engine.sized_for(
        model,
        longest,
        spec["sequences"],
        spec["max_new_tokens"],
        size,
        record_routes=spec["record_routes"],
    )
    if spec["check_memory"]:
        model.transformer.checksums.begin()
    return engine


def scales_to_plain(scales: KVScales | None) -> list[list[float]] | None:
    """Return calibrated scales as lists of numbers, float32 widened."""
    return None if scales is None else scales.values.tolist()


def scales_from_plain(values: list[list[float]] | None, version: int) -> KVScales | None:
    """Return the scales from what `scales_to_plain` returned."""
    return None if values is None else KVScales(torch.tensor(values, dtype=torch.float32), version)


def request(
    index: int, prompt: Sequence[int], prompt_id: int, sampling: Sampling, sample_index: int = 0
) -> dict[str, Any]:
    """Return a group that is to be sampled as plain values: `index` names it within its batch, its
    samples begin at `sample_index`. Raises IsobitError for a shaping, which is an engine's own."""
    check_plain(sampling)
    return {
        "index": index,
        "prompt": list(prompt),
        "prompt_id": prompt_id,
        "sample_index": sample_index,
        "sampling": _fields(Sampling, sampling),
    }


def sampling_of(values: Mapping[str, Any]) -> Sampling:
    """Return the sampling settings of a request from plain values."""
    return Sampling(
        **{**values, "stop": tuple(values["stop"]), "stop_tokens": tuple(values["stop_tokens"])}
    )


def completion_of(values: Mapping[str, Any]) -> Completion:
    """Return a completion from its fields as plain values."""
    top = values.get("top_logprobs")
    pairs = (
        None
        if top is None
        else [[(token, value) for token, value in likeliest] for likeliest in top]
    )
    forks = tuple(values.get("forks", ()))
    return Completion(**{**values, "top_logprobs": pairs, "forks": forks})


def _fields(kind: type, value: Any) -> dict[str, Any]:
    """Return the values of the fields that `kind` declares; a config's section may have more."""
    return {field.name: getattr(value, field.name) for field in fields(kind)}
