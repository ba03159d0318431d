"""Tinker's messages: what several routes read of them, and the protobuf, read and written, whose
classes are those of the `tinker` package, which is the format's home. Left out: images and audio,
which are refused."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.engine.types import Completion, Top
from isobit.errors import IsobitError, brief
from isobit.rl.stepwise import Datum, Outputs
from isobit.serve.requests import BadRequest, Fields
from isobit.serve.scoring import Scores

PREFIX = "/api/v1"
"""Of the path of every route."""
PROTOBUF = "application/x-protobuf"
HIGHEST_NUMBER = 2**62
"""Of a request, a run or a sampling client, as its session counts them."""
SHORTEST_TTL, LONGEST_TTL = 3600, 3660 * 86400
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 64, 256, 1024
_MOST_ENTRIES, _MOST_PARTS = 1 << 24, 1 << 16
"""Of a request's tensors, written out where they are sparse; data, chunks and tensors of a request,
of which an empty one has two bytes and takes far longer to read."""


@dataclass
class _Room:
    """What the rest of a request may have."""

    entries: int = _MOST_ENTRIES
    parts: int = _MOST_PARTS

    def take(self, entries: int = 0, parts: int = 0) -> None:
        """So much less. Raises BadRequest where it is too much."""
        self.entries, self.parts = self.entries - entries, self.parts - parts
        if self.entries < 0:
            raise BadRequest(
                f"a request's tensors may have {_MOST_ENTRIES:,} entries; send fewer data"
            )
        if self.parts < 0:
            raise BadRequest(
                f"a request may have {_MOST_PARTS:,} data, chunks and tensors; send fewer data"
            )


@dataclass(frozen=True, eq=False)
class Batch:
    """What `forward_backward` is asked for: a `loss` by its name, of these data, with a gradient
    unless `forward_only`."""

    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float]
    forward_only: bool


def number_of(fields: Fields, key: str = "seq_id", lowest: int = 1) -> int:
    """The number by which a client's session counts something. Raises BadRequest."""
    return fields.whole(key, 0, lowest, HIGHEST_NUMBER)


def ttl_of(fields: Fields) -> float | None:
    """Seconds after which a checkpoint is dropped; None: never. Raises BadRequest."""
    if fields.take("ttl_seconds") is None:
        return None
    return float(fields.whole("ttl_seconds", 0, SHORTEST_TTL, LONGEST_TTL))


def metadata_of(fields: Fields) -> dict[str, str]:
    """What a client says of its session, its run or its checkpoint: texts as they are, other values
    as JSON. Raises BadRequest."""
    key = "user_metadata"
    found = fields.inner(key).all()
    if len(found) > _MOST_METADATA:
        raise BadRequest(f"{key}: at most {_MOST_METADATA} entries, got {len(found):,}", key)
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in found.items()
    }
    for name, text in texts.items():
        if len(name) > _LONGEST_KEY or len(text) > _LONGEST_VALUE:
            raise BadRequest(
                f"{key}: {brief(repr(name), 80)}: expected a key of at most {_LONGEST_KEY} "
                f"characters, and a value of {_LONGEST_VALUE:,}",
                key,
            )
    return texts


def package() -> Any:
    """The messages' classes. Raises IsobitError where the package is missing."""
    try:
        from tinker.proto import tinker_public_pb2
    except ModuleNotFoundError:
        raise IsobitError(
            "Tinker's routes need its package: pip install tinker zstandard"
        ) from None
    return tinker_public_pb2


def unpacked(body: bytes, limit: int) -> bytes:
    """A body that came in zstd. Raises BadRequest for what is none, and beyond `limit` bytes."""
    try:
        import zstandard
    except ModuleNotFoundError:
        raise BadRequest("Content-Encoding: zstd needs pip install zstandard") from None
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as stream:
            found: bytes = stream.read(limit + 1)
    except zstandard.ZstdError:
        raise BadRequest("the body is no zstd, as its Content-Encoding says") from None
    if len(found) > limit:
        raise BadRequest(f"the body is longer than {limit:,} bytes when unpacked", status=413)
    return found


def read_message(body: bytes) -> Any:
    """A ForwardBackwardRequest. Raises BadRequest for other bytes."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    message = package().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise BadRequest("the body is no ForwardBackwardRequest in protobuf") from None
    return message


def read_batch(message: Any) -> Batch:
    """What a ForwardBackwardRequest asks for. Raises BadRequest."""
    room = _Room()
    data = [_read_datum(each, place, room) for place, each in enumerate(message.data)]
    options = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise BadRequest(f"loss_fn_config: {brief(name, 80)}: expected a number")
        options[name] = value.number
    return Batch(data, message.loss_fn, options, message.forward_only)


def write_outputs(outputs: Outputs) -> bytes:
    """A ForwardBackwardOutput: log-probabilities by datum, in records of one trailing shape."""
    messages = package()
    found = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in outputs.metrics.items():
        found.metrics[name] = value
    for shape, group in groupby(outputs.logprobs, key=lambda each: each.shape[1:]):
        arrays = [each.numpy().astype(np.float32) for each in group]
        record = found.loss_fn_outputs.add(num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.dtype = messages.DTYPE_FLOAT32
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum(
            [0, *(array.nbytes for array in arrays)], dtype=np.int64
        ).tobytes()
        field.trailing_shape.extend(shape)
    return bytes(found.SerializeToString())


def encoded(
    completions: list[Completion],
    scores: Scores | None,
) -> bytes:
    """A sample's response. Raises IsobitError where the package is missing."""
    messages = package()
    found = messages.SampleResponse()
    for completion in completions:
        stopped = completion.finish_reason == "stop"
        sequence = found.sequences.add(
            stop_reason=messages.STOP_REASON_STOP if stopped else messages.STOP_REASON_LENGTH,
            tokens=np.asarray(completion.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
        if completion.top_logprobs is not None:
            _write_top(sequence.topk_sampled_logprobs, completion.top_logprobs)
    if scores is not None:
        found.prompt_logprobs = np.asarray(scores.logprobs, np.float32).tobytes()
        if scores.tops is not None:
            _write_top(found.topk_prompt_logprobs, scores.tops)
    return bytes(found.SerializeToString())


def _write_top(message: Any, tops: list[Top]) -> None:
    """Matrices [places, k]; a place without a token has token 0 and -99999, as the format says."""
    width = max(map(len, tops), default=0)
    tokens = np.zeros((len(tops), width), np.int32)
    logprobs = np.full((len(tops), width), -99999.0, np.float32)
    for place, top in enumerate(tops):
        for rank, (token, logprob) in enumerate(top):
            tokens[place, rank], logprobs[place, rank] = token, logprob
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.length, message.k = tokens.shape


def _read_datum(message: Any, place: int, room: _Room) -> Datum:
    where, tokens = f"data.{place}", list[int]()
    room.take(parts=1 + len(message.model_input) + len(message.loss_fn_inputs))
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise BadRequest(f"{where}.model_input: only tokens are offered, no images or audio")
        tokens += _array(chunk.encoded_text.tokens, np.int32, f"{where}.model_input").tolist()
    inputs = {
        name: _read_tensor(tensor, f"{where}.{brief(name, 40)}", room)
        for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum(tuple(tokens), inputs)


def _read_tensor(message: Any, where: str, room: _Room) -> Tensor:
    """[N] or [N, K]; what a sparse one does not name is 0."""
    messages = package()
    kinds = {
        messages.DTYPE_FLOAT32: np.float32,
        messages.DTYPE_INT64: np.int64,
        messages.DTYPE_INT32: np.int32,
    }
    if message.dtype not in kinds:
        raise BadRequest(f"{where}: expected a tensor of float32 or int64")
    sparse, shape = message.HasField("sparse_csr"), list(message.shape)
    values = _array(
        message.sparse_csr.values if sparse else message.dense, kinds[message.dtype], where
    )
    if not shape and not sparse:
        shape = [len(values)]
    if len(shape) not in (1, 2) or min(shape) < 0 or max(shape) > _MOST_ENTRIES:
        raise BadRequest(f"{where}: a tensor of shape {brief(shape, 80)}; expected [N] or [N, K]")
    room.take(entries=int(np.prod(shape)))
    if sparse:
        values = _dense(message.sparse_csr, values, shape, where)
    elif len(values) != np.prod(shape):
        raise BadRequest(f"{where}: {len(values):,} values for a tensor of shape {shape}")
    found = torch.from_numpy(values.copy()).view(shape)
    return found if found.is_floating_point() else found.long()


def _dense(csr: Any, values: Any, shape: list[int], where: str) -> Any:
    """A compressed sparse matrix, written out."""
    rows = _array(csr.crow_indices, np.int64, where)
    columns = _array(csr.col_indices, np.int64, where)
    if (
        len(shape) != 2
        or len(rows) != shape[0] + 1
        or len(columns) != len(values)
        or rows[0] != 0
        or rows[-1] != len(values)
        or (np.diff(rows) < 0).any()
        or ((columns < 0) | (columns >= shape[1])).any()
    ):
        raise BadRequest(f"{where}: its indices are not those of a sparse matrix of shape {shape}")
    found = np.zeros(shape, values.dtype)
    found[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return found.reshape(-1)


def _array(content: bytes, kind: Any, where: str) -> Any:
    if len(content) % np.dtype(kind).itemsize:
        raise BadRequest(f"{where}: {len(content):,} bytes are no {np.dtype(kind).name}")
    return np.frombuffer(content, kind)
