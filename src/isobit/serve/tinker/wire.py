"""Tinker's protobuf: its messages are those of the `tinker` package, which is the format's home."""

from typing import Any

import numpy as np

from isobit.engine.types import Completion
from isobit.errors import IsobitError

PROTOBUF = "application/x-protobuf"


def package() -> Any:
    """The messages' classes. Raises IsobitError where the package is missing."""
    try:
        from tinker.proto import tinker_public_pb2
    except ModuleNotFoundError:
        raise IsobitError(
            "Tinker's routes need its package: pip install 'isobit[tinker]'"
        ) from None
    return tinker_public_pb2


def encoded(completions: list[Completion], prompt_logprobs: list[float] | None) -> bytes:
    """A sample's response in Tinker's protobuf. Raises IsobitError where the package is missing."""
    messages = package()
    found = messages.SampleResponse()
    for completion in completions:
        stopped = completion.finish_reason == "stop"
        found.sequences.add(
            stop_reason=messages.STOP_REASON_STOP if stopped else messages.STOP_REASON_LENGTH,
            tokens=np.asarray(completion.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        found.prompt_logprobs = np.asarray(prompt_logprobs, np.float32).tobytes()
    return found.SerializeToString()
