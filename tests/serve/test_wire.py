"""Tinker's protobuf: what the client writes is read as it meant it, and what we write it reads."""

from typing import Any

import numpy as np
import pytest
import torch

from isobit.rl.stepwise import Outputs
from isobit.serve.requests import BadRequest

tinker: Any = pytest.importorskip("tinker")

from tinker.proto.response_conv import deserialize_forward_backward_output  # noqa: E402

from isobit.serve.tinker import wire  # noqa: E402

from .training import message  # noqa: E402


def read(tokens: list[int], **inputs: Any) -> wire.Batch:
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    return wire.read_batch(wire.read_message(message("r", 1, [datum])))


def test_dense_and_sparse_tensors_are_read_alike() -> None:
    """The client writes a matrix with few entries as a sparse one; the control has another entry."""
    targets, weights = torch.zeros(9, 6, dtype=torch.int64), torch.zeros(9, 6)
    targets[2, 3], targets[8, 0], weights[2, 3], weights[5, 5] = 7, 9, 0.5, -1.0
    batch = read(list(range(9)), target_tokens=targets, weights=weights)
    assert message("r", 1, [_datum(targets, weights)]).find(b"weights") > 0
    (found,) = batch.data
    assert found.tokens == tuple(range(9))
    assert torch.equal(found.inputs["target_tokens"], targets)
    assert torch.equal(found.inputs["weights"], weights)
    dense = {
        "target_tokens": tinker.TensorData.from_torch(targets),
        "weights": tinker.TensorData.from_torch(weights),
    }
    (same,) = read(list(range(9)), **dense).data
    assert torch.equal(same.inputs["weights"], weights)
    other = weights.clone()
    other[0, 0] = 1
    (changed,) = read(list(range(9)), target_tokens=targets, weights=other).data
    assert not torch.equal(changed.inputs["weights"], weights)


@pytest.mark.parametrize("shape", [(4,), (4, 2)])
def test_no_weights_are_ones_of_a_loss_that_weighs(shape: tuple[int, ...]) -> None:
    """Of the targets' shape; the controls are of another loss, and have weights of their own."""
    targets, own = torch.ones(shape, dtype=torch.int64), torch.full(shape, 0.5)

    def weights(loss: str, **inputs: torch.Tensor) -> torch.Tensor | None:
        prompt = tinker.ModelInput.from_ints([4, 5, 6, 7])
        datum = tinker.Datum(
            model_input=prompt, loss_fn_inputs={"target_tokens": targets, **inputs}
        )
        (found,) = wire.read_batch(wire.read_message(message("r", 1, [datum], loss))).data
        return found.inputs.get("weights")

    made = weights("cross_entropy")
    assert made is not None
    assert torch.equal(made, torch.ones(shape))
    assert made.dtype == torch.float32
    assert weights("ppo") is None
    kept = weights("cross_entropy", weights=own)
    assert kept is not None
    assert torch.equal(kept, own)


def _datum(targets: torch.Tensor, weights: torch.Tensor) -> Any:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(range(len(targets)))),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )


def sparse(**given: Any) -> Any:
    """A request whose weights are a sparse [3, 2], with something wrong."""
    messages = wire.package()
    request = messages.ForwardBackwardRequest(model_id="r", seq_id=1)
    datum = request.data.add()
    tensor = datum.loss_fn_inputs["weights"]
    tensor.dtype = messages.DTYPE_FLOAT32
    tensor.shape.extend(given.get("shape", (3, 2)))
    csr = tensor.sparse_csr
    csr.values = np.ones(given.get("values", 2), np.float32).tobytes()
    csr.crow_indices = np.array(given.get("rows", [0, 1, 1, 2]), np.int64).tobytes()
    csr.col_indices = np.array(given.get("columns", [1, 0]), np.int64).tobytes()
    return request


def test_a_sparse_matrix_must_be_one() -> None:
    (datum,) = wire.read_batch(sparse()).data
    assert datum.inputs["weights"].tolist() == [[0, 1], [0, 0], [1, 0]]


@pytest.mark.parametrize(
    "given",
    [
        {"rows": [0, 2, 1, 2]},
        {"rows": [0, 1, 2]},
        {"rows": [1, 1, 1, 2]},
        {"rows": [0, 1, 1, 3]},
        {"columns": [1, 2]},
        {"columns": [-1, 0]},
        {"columns": [1]},
        {"values": 3},
        {"shape": (6,)},
        {"shape": (3, -2)},
        {"shape": (1 << 40, 1 << 40)},
        {"shape": (1 << 13, 1 << 13)},
    ],
)
def test_what_is_no_sparse_matrix_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"shape|entries"):
        wire.read_batch(sparse(**given))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_entries_that_are_not_finite_are_refused(number: float) -> None:
    """Also those that no loss reads; the control is large and finite."""
    entries = torch.tensor([1.0, number, 0.0])
    for given in (entries, torch.diag(entries)):
        if number == 3e38:
            (found,) = read([5, 6, 7], advantages=given).data
            assert torch.equal(found.inputs["advantages"], given)
        else:
            with pytest.raises(BadRequest, match=r"data\.0\.advantages has NaN or infinity in it$"):
                read([5, 6, 7], advantages=given)


def test_images_and_texts_of_a_loss_are_refused() -> None:
    messages = wire.package()
    request = messages.ForwardBackwardRequest()
    request.data.add().model_input.add().image.data = b"x"
    with pytest.raises(BadRequest, match="only tokens are offered"):
        wire.read_batch(request)
    request = messages.ForwardBackwardRequest()
    request.loss_fn_config_v2["kl"].text = "x"
    with pytest.raises(BadRequest, match="kl: expected a number"):
        wire.read_batch(request)
    with pytest.raises(BadRequest, match="no ForwardBackwardRequest"):
        wire.read_message(b"\xff" * 9)


@pytest.mark.slow
def test_very_many_parts_are_refused_before_they_are_read() -> None:
    """A body within its limit may have millions of empty ones; the control has as many as a
    request may have."""
    messages = wire.package()

    def many(count: int) -> Any:
        request = messages.ForwardBackwardRequest()
        chunks = request.data.add().model_input
        for _ in range(count):
            chunks.add().encoded_text.tokens = b""
        return request

    assert len(wire.read_batch(many(65_535)).data) == 1
    assert len(wire.read_batch(wire.read_message(b"\x1a\x00" * 65_536)).data) == 65_536
    for request in (many(65_536), wire.read_message(b"\x1a\x00" * 65_537)):
        with pytest.raises(BadRequest, match="65,536 data, chunks and tensors; send fewer"):
            wire.read_batch(request)


def test_outputs_are_those_that_the_client_reads() -> None:
    """Of one and of several targets to a position, one after the other."""
    shapes = [(3,), (1,), (4, 2), (2, 2), (2, 5), (5,)]
    random = torch.Generator().manual_seed(1)
    logprobs = [torch.randn(shape, generator=random) for shape in shapes]
    written = wire.write_outputs(Outputs(logprobs, {"loss:sum": 0.5}))
    found = deserialize_forward_backward_output(written)
    assert found.metrics == {"loss:sum": 0.5}
    read = [torch.from_numpy(each["logprobs"].to_numpy()) for each in found.loss_fn_outputs]
    assert len(read) == len(logprobs)
    assert all(torch.equal(a, b) for a, b in zip(read, logprobs, strict=True))


def test_a_body_in_zstd_is_read_whole_or_refused() -> None:
    """All its frames, those that are to be skipped too; what is cut anywhere, or is something else
    behind its frames, is none."""
    zstandard = pytest.importorskip("zstandard")
    text = bytes(range(256)) * 40
    first, second = (zstandard.compress(half) for half in (text[:7000], text[7000:]))
    streamed = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    streamed = streamed.compress(text) + streamed.flush()
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    limit = len(text)
    for body in (first + second, streamed, skipped + first + skipped + second + skipped):
        assert wire.unpacked(body, limit) == text
        for end in (1, 3, len(body) // 2, len(body) - 5, len(body) - 1):
            if body[:end] in (first, skipped + first):
                continue
            with pytest.raises(BadRequest, match=r"is cut|no zstd"):
                wire.unpacked(body[:end], limit)
    for body in (b"", b"text", first + b"text", b"\x00" + first):
        with pytest.raises(BadRequest, match=r"is cut|no zstd"):
            wire.unpacked(body, limit)
    bomb = zstandard.compress(bytes(1 << 26))
    for body in (first + second, bomb, first + bomb):
        with pytest.raises(BadRequest, match="longer than 7,000 bytes when unpacked") as found:
            wire.unpacked(body, 7000)
        assert found.value.status == 413
    empty = zstandard.compress(b"")
    assert wire.unpacked(empty * 4096, limit) == b""
    with pytest.raises(BadRequest, match="more than 4,096 frames"):
        wire.unpacked(empty * 4097, limit)
