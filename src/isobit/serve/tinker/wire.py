"""Tinker's messages in protobuf, read and written by the classes of the `tinker` package, which
defines the format. Left out: images and audio, which are
refused."""

import hashlib
import math
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
from isobit.serve.requests import BadRequest
from isobit.serve.scoring import Scores
from isobit.serve.tinker.protocol import HIGHEST_NUMBER

PREFIX = "/api/v1"
"""The beginning of the path of every route."""
PROTOBUF = "application/x-protobuf"
_MOST_ENTRIES, _MOST_PARTS = 1 << 24, 1 << 16
"""The most entries of a request's tensors, sparse ones written out; the most data, chunks and
tensors of a request, of which an empty one has two bytes, and takes far longer to read than these
and far more memory."""
_OWN_FIELDS, _SMALLEST_ENTRY = 16, 4
"""The fields of a request besides its data; the bytes of the smallest entry."""
_MOST_FRAMES, _FED_BYTES = 4096, 256
"""The most frames of a zstd body; the bytes of it that are unpacked at once, to at most 32,768
times as many."""


@dataclass
class _Room:
    """The entries and parts that the rest of a request may have."""

    entries: int = _MOST_ENTRIES
    parts: int = _MOST_PARTS

    def take(self, entries: int = 0, parts: int = 0) -> None:
        """Take entries and parts from the room. Raises BadRequest where it has not enough of
        them."""
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
    """The content of a request for `forward_backward`: a `loss` by its name, of these data, with a
    gradient unless `forward_only`."""

    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float]
    forward_only: bool


def package() -> Any:
    """Return the module of the messages' classes. Raises IsobitError where the package is
    missing."""
    try:
        from tinker.proto import tinker_public_pb2
    except ModuleNotFoundError:
        raise IsobitError(
            "Tinker's routes need its package: pip install tinker zstandard"
        ) from None
    return tinker_public_pb2


@dataclass(frozen=True)
class Head:
    """The fields of a ForwardBackwardRequest that are read when it arrives: its run and number; its
    bytes when unpacked; as `digest`, the SHA-256 of the message in its canonical form."""

    run: str
    number: int
    bytes: int
    digest: str


def read_head(body: bytes, encoding: str, limit: int) -> Head:
    """Check a ForwardBackwardRequest as far as that is possible without its run, and return its
    head alone, so that the message does not stay in memory. Raises BadRequest."""
    body = plain(body, encoding, limit)
    message = read_message(body)
    if not 1 <= message.seq_id < HIGHEST_NUMBER:
        raise BadRequest("seq_id: expected a whole number from 1", "seq_id")
    _measure(message)
    canonical = message.SerializeToString(deterministic=True)
    digest = hashlib.sha256(canonical).hexdigest()
    return Head(message.model_id, message.seq_id, len(body), digest)


def plain(body: bytes, encoding: str, limit: int) -> bytes:
    """Return a body as it was before its Content-Encoding. Raises BadRequest as `unpacked`, and for
    another encoding than zstd (415)."""
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise BadRequest("Content-Encoding: expected zstd, or none", status=415)
    return unpacked(body, limit)


def unpacked(body: bytes, limit: int) -> bytes:
    """Return all frames of a body that came in zstd, unpacked, one after the other. Raises
    BadRequest for bytes that are not zstd, for a frame that is cut, for too many frames, and beyond
    `limit` bytes."""
    try:
        import zstandard
    except ModuleNotFoundError:
        raise BadRequest("Content-Encoding: zstd needs pip install zstandard") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    chunks, size, frames = list[bytes](), 0, 0
    frame: Any = None
    try:
        for start in range(0, len(body), _FED_BYTES):
            rest = body[start : start + _FED_BYTES]
            while rest:
                if frame is None:
                    frame, frames = decompressor.decompressobj(), frames + 1
                    if frames > _MOST_FRAMES:
                        raise BadRequest(f"the body has more than {_MOST_FRAMES:,} frames of zstd")
                chunks.append(frame.decompress(rest))
                size += len(chunks[-1])
                if size > limit:
                    raise BadRequest(
                        f"the body is longer than {limit:,} bytes when unpacked", status=413
                    )
                rest, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError:
        raise BadRequest("the body is no zstd, as its Content-Encoding says") from None
    if frame is not None or not frames:
        raise BadRequest("the body is cut: its last frame of zstd does not end")
    return b"".join(chunks)


def read_message(body: bytes) -> Any:
    """Parse a ForwardBackwardRequest. Raises BadRequest for other bytes, and, before a message is
    made of them, for one that would have very many parts."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    message = package().ForwardBackwardRequest()
    _count_parts(memoryview(body), message.DESCRIPTOR, _Room(parts=_MOST_PARTS + _OWN_FIELDS), 2)
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise _no_message() from None
    return message


def _no_message() -> BadRequest:
    return BadRequest("the body is no ForwardBackwardRequest in protobuf")


def _count_parts(body: memoryview, descriptor: Any, room: _Room, depth: int) -> None:
    """Take all fields of a message in protobuf from its room, and those of messages in it, down to
    `depth` levels: deeper messages do not count as parts. Raises BadRequest for bytes that are not
    a message."""
    inner = {field.number: field.message_type for field in descriptor.fields}
    position = 0
    while position < len(body):
        tag, position = _varint(body, position)
        room.take(parts=1)
        wire_type = tag & 7
        if wire_type == 0:
            _, position = _varint(body, position)
        elif wire_type in (1, 5):
            position += 8 if wire_type == 1 else 4
        elif wire_type == 2:
            size, position = _varint(body, position)
            message_type = inner.get(tag >> 3)
            if depth > 1 and size and message_type is not None:
                _count_parts(body[position : position + size], message_type, room, depth - 1)
            position += size
        else:
            raise _no_message()
    if position > len(body):
        raise _no_message()


def _varint(body: memoryview, position: int) -> tuple[int, int]:
    """Return (the number at a place, the place after it). Raises BadRequest for a number that does
    not end."""
    number = 0
    for shift in range(10):
        if position >= len(body):
            break
        byte, position = body[position], position + 1
        number |= (byte & 127) << 7 * shift
        if byte < 128:
            return number, position
    raise _no_message()


def _measure(message: Any) -> None:
    """Raise BadRequest for a request with too many data, chunks and tensors, or entries of these;
    nothing is written out for that."""
    room = _Room()
    for datum in message.data:
        room.take(parts=1 + len(datum.model_input) + len(datum.loss_fn_inputs))
        for tensor in datum.loss_fn_inputs.values():
            shape = tensor.shape or [len(tensor.dense) // _SMALLEST_ENTRY]
            room.take(entries=math.prod(max(size, 0) for size in shape[:2]))


def read_batch(message: Any) -> Batch:
    """Return the batch of a ForwardBackwardRequest. Raises BadRequest."""
    _measure(message)
    weighed = message.loss_fn == "cross_entropy"
    data = [_read_datum(datum, index, weighed) for index, datum in enumerate(message.data)]
    options = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise BadRequest(f"loss_fn_config: {brief(name, 80)}: expected a number")
        options[name] = value.number
    return Batch(data, message.loss_fn, options, message.forward_only)


def write_outputs(outputs: Outputs) -> bytes:
    """Return a ForwardBackwardOutput: log-probabilities by datum, in records of one trailing
    shape."""
    messages = package()
    output = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in outputs.metrics.items():
        output.metrics[name] = value
    for shape, group in groupby(outputs.logprobs, key=lambda logprobs: logprobs.shape[1:]):
        arrays = [logprobs.numpy().astype(np.float32) for logprobs in group]
        record = output.loss_fn_outputs.add(num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.dtype = messages.DTYPE_FLOAT32
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum(
            [0, *(array.nbytes for array in arrays)], dtype=np.int64
        ).tobytes()
        field.trailing_shape.extend(shape)
    return bytes(output.SerializeToString())


def encoded(completions: list[Completion], scores: Scores | None) -> bytes:
    """Return a SampleResponse of completions and a prompt's scores, None: none. Raises IsobitError
    where the package is missing."""
    messages = package()
    response = messages.SampleResponse()
    for completion in completions:
        stopped = completion.finish_reason == "stop"
        sequence = response.sequences.add(
            stop_reason=messages.STOP_REASON_STOP if stopped else messages.STOP_REASON_LENGTH,
            tokens=np.asarray(completion.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
        if completion.top_logprobs is not None:
            _write_top(sequence.topk_sampled_logprobs, completion.top_logprobs)
    if scores is not None:
        response.prompt_logprobs = np.asarray(scores.logprobs, np.float32).tobytes()
        if scores.tops is not None:
            _write_top(response.topk_prompt_logprobs, scores.tops)
    return bytes(response.SerializeToString())


def _write_top(message: Any, tops: list[Top]) -> None:
    """Write the likeliest tokens as matrices [places, k]; a place without a token has token 0 and
    -99999, as the format says."""
    width = max(map(len, tops), default=0)
    tokens = np.zeros((len(tops), width), np.int32)
    logprobs = np.full((len(tops), width), -99999.0, np.float32)
    for index, top in enumerate(tops):
        for rank, (token, logprob) in enumerate(top):
            tokens[index, rank], logprobs[index, rank] = token, logprob
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.length, message.k = tokens.shape


def _read_datum(message: Any, index: int, weighed: bool) -> Datum:
    """Return a datum; where a loss has it `weighed` and it has no weights, these are ones."""
    where, tokens = f"data.{index}", list[int]()
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise BadRequest(f"{where}.model_input: only tokens are offered, no images or audio")
        tokens += _array(chunk.encoded_text.tokens, np.int32, f"{where}.model_input").tolist()
    inputs = {
        name: _read_tensor(tensor, f"{where}.{brief(name, 40)}")
        for name, tensor in message.loss_fn_inputs.items()
    }
    if weighed and (targets := inputs.get("target_tokens")) is not None:
        inputs.setdefault("weights", torch.ones(targets.shape))
    return Datum(tuple(tokens), inputs)


def _read_tensor(message: Any, where: str) -> Tensor:
    """Return a tensor [N] or [N, K]; entries that a sparse one does not name are 0. Raises
    BadRequest."""
    messages = package()
    kinds = {
        messages.DTYPE_FLOAT32: np.float32,
        messages.DTYPE_INT64: np.int64,
        messages.DTYPE_INT32: np.int32,
    }
    if message.dtype not in kinds:
        raise BadRequest(f"{where}: expected a tensor of float32 or int64")
    sparse, shape = message.HasField("sparse_csr"), list(message.shape[:3])
    values = _array(
        message.sparse_csr.values if sparse else message.dense, kinds[message.dtype], where
    )
    if not shape and not sparse:
        shape = [len(values)]
    if len(shape) not in (1, 2) or min(shape) < 0 or max(shape) > _MOST_ENTRIES:
        raise BadRequest(f"{where}: a tensor of shape {brief(shape, 80)}; expected [N] or [N, K]")
    if sparse:
        values = _dense(message.sparse_csr, values, shape, where)
    elif len(values) != np.prod(shape):
        raise BadRequest(f"{where}: {len(values):,} values for a tensor of shape {shape}")
    tensor = torch.from_numpy(values.copy()).view(shape)
    return tensor if tensor.is_floating_point() else tensor.long()


def _dense(csr: Any, values: Any, shape: list[int], where: str) -> Any:
    """Return the entries of a compressed sparse matrix, written out. Raises BadRequest for other
    indices."""
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
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense.reshape(-1)


def _array(content: bytes, kind: Any, where: str) -> Any:
    if len(content) % np.dtype(kind).itemsize:
        raise BadRequest(f"{where}: {len(content):,} bytes are no {np.dtype(kind).name}")
    array = np.frombuffer(content, kind)
    if not np.isfinite(array).all():
        raise BadRequest(f"{where} has NaN or infinity in it")
    return array
