"""The requests of Tinker's routes in JSON, key by key, as its official client sends them."""

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from isobit.errors import brief
from isobit.options.declare import at_least, at_most
from isobit.rl.stepwise import Adam
from isobit.serve.protocol import SamplingKeys, Top
from isobit.serve.requests import BadRequest, Declared, Most, Neutral

HIGHEST_NUMBER = 2**62
"""The highest number of a request, a run or a sampling client, by which its session counts it."""
SHORTEST_TTL, LONGEST_TTL = 3600, 3660 * 86400
_HIGHEST_RANK = 1 << 16
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 64, 256, 1024
Number = Annotated[int, at_least(1), at_most(HIGHEST_NUMBER)]
NumberFrom0 = Annotated[int, at_least(0), at_most(HIGHEST_NUMBER)]
Seconds = Annotated[int, at_least(SHORTEST_TTL), at_most(LONGEST_TTL)]
Metadata = Mapping[str, Any]
_ADAMW = Neutral("another optimizer than AdamW", ({"type": "adamw"}, {}))


class Named(Declared):
    """A request that names what it is about, by one of these keys; others are passed over."""

    strict = False
    session_id: str | None = None
    request_id: str | None = None
    model_id: str | None = None
    tinker_path: str | None = None


class CreateSession(Declared):
    """A request for a session."""

    strict = False
    sdk_version: str | None = None
    display_name: str | None = None
    user_metadata: Metadata = field(default_factory=dict)


class CreateSampler(Declared):
    """A request for a sampling client."""

    strict = False
    session_id: str | None = None
    sampling_session_seq_id: NumberFrom0 = 0
    base_model: str | None = None
    model_path: str | None = None


class Sample(Declared):
    """A request for answers to a prompt."""

    neutral = {
        "prompt_alt_tokens_k": Neutral("alternative tokens of a prompt", (0,)),
        "record_stability_info": Neutral(
            "what the loss stable_reinforce reads, whose formula is not published (give "
            "loss_fn=importance_sampling, ppo or cispo)",
            (False,),
        ),
    }
    sampling_session_id: str | None = None
    seq_id: NumberFrom0 = 0
    num_samples: Annotated[int, at_least(1), Most("samples")] = 1
    prompt: Mapping[str, Any] = field(default_factory=dict)
    sampling_params: SamplingKeys = SamplingKeys()
    topk_sample_logprobs: Top = 0
    topk_prompt_logprobs: Top = 0
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: Any = None
    base_model: Any = None
    model_path: Any = None
    type: Any = None


class OfRun(Declared):
    """The keys of every request to a run."""

    type: str | None = None
    model_id: str | None = None
    seq_id: Number


class RunHead(OfRun):
    """The keys that are read when such a request comes; the others are read in its turn."""

    strict = False


class LoraConfig(Declared):
    """The shape of an adapter; rank 0: none, all weights are trained."""

    rank: Annotated[int, at_least(0), at_most(_HIGHEST_RANK)] = 0
    seed: Annotated[int, at_least(-(2**63)), at_most(2**63 - 1)] | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class NewRun(Declared):
    """The keys of a request for a run, of a new adapter or of saved weights."""

    neutral = {"optimizer_config": _ADAMW}
    type: Any = None
    session_id: str | None = None
    model_seq_id: NumberFrom0 = 0
    base_model: str | None = None
    user_metadata: Metadata = field(default_factory=dict)


class CreateModel(NewRun):
    """A request for a run of a new adapter, or of all weights."""

    lora_config: LoraConfig = LoraConfig()


class LoadWeights(NewRun):
    """A request to load saved weights into a run, or, with a `session_id`, into a new one."""

    neutral = NewRun.neutral | {"weights_access_token": Neutral("weights of other accounts")}
    model_id: str | None = None
    seq_id: Number | None = None
    path: str = ""
    optimizer: bool = False


class OptimStep(OfRun):
    """A request for an optimizer step."""

    neutral = {"optimizer_params": Neutral("another optimizer than AdamW")}
    adam_params: Adam = Adam()


class Save(OfRun):
    """A request to save a run's weights."""

    neutral = {
        "age_encryption_recipients": Neutral("encryption (take the checkpoint's archive)", ([],))
    }
    path: str | None = None
    ttl_seconds: Seconds | None = None
    user_metadata: Metadata = field(default_factory=dict)


class SaveToTrain(Save):
    """Such a request, for weights to train from. Others replace what has their name."""

    overwrite: bool = False


class SaveToSample(Save):
    """Such a request, for weights to sample from; with a number, by a client without a name."""

    neutral = {"kind": Neutral("a sampling client whose weights change", ("snapshot",))}
    sampling_session_seq_id: NumberFrom0 | None = None

    def __post_init__(self) -> None:
        if self.path is not None and self.sampling_session_seq_id is not None:
            raise BadRequest(
                "path: weights of a sampling client have no name; leave it out, or "
                "sampling_session_seq_id",
                "path",
            )


class SetTtl(Declared):
    """The seconds after which a checkpoint is dropped; null: never."""

    ttl_seconds: Seconds | None = None


def metadata_of(metadata: Metadata) -> dict[str, str]:
    """Return the metadata that a client gives its session, run or checkpoint: texts unchanged,
    other values as JSON. Raises BadRequest."""
    key = "user_metadata"
    if len(metadata) > _MOST_METADATA:
        raise BadRequest(f"{key}: at most {_MOST_METADATA} entries, got {len(metadata):,}", key)
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
        if value is not None
    }
    for name, text in texts.items():
        if len(name) > _LONGEST_KEY or len(text) > _LONGEST_VALUE:
            raise BadRequest(
                f"{key}: {brief(repr(name), 80)}: expected a key of at most {_LONGEST_KEY} "
                f"characters, and a value of {_LONGEST_VALUE:,}",
                key,
            )
    return texts
