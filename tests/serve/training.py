"""What tests of training over HTTP share: data, and the official client's steps."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
from tinker.proto import tinker_public_pb2 as messages
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

from isobit.serve.tinker.runs import Run

from .helpers import Running

PROMPT = [5, 6, 7]


def datum(tokens: Sequence[int], weights: Sequence[float] | None = None) -> Any:
    """Each token predicts the next."""
    given = [1.0] * (len(tokens) - 1) if weights is None else list(weights)
    inputs = {"target_tokens": list(tokens[1:]), "weights": given}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs
    )


def data(seed: int, count: int = 4) -> list[Any]:
    """Random sequences."""
    random = np.random.default_rng(seed)
    return [datum(random.integers(4, 60, random.integers(3, 12)).tolist()) for _ in range(count)]


def message(run: str, number: int, given: list[Any], loss: str = "cross_entropy") -> bytes:
    """The body of a `forward_backward`."""
    asked = ForwardBackwardRequest(ForwardBackwardInput(given, loss), run, number)
    return forward_backward_request_to_proto(asked).SerializeToString()


def train(client: Any, seed: int, steps: int, rate: float = 3e-2) -> None:
    """Some steps of supervised training, each of two calls."""
    asked = []
    for step in range(steps):
        asked += [
            client.forward_backward(data(1000 * seed + 2 * step), "cross_entropy"),
            client.forward_backward(data(1000 * seed + 2 * step + 1), "cross_entropy"),
            client.optim_step(tinker.AdamParams(learning_rate=rate, grad_clip_norm=1.0)),
        ]
    for future in asked:
        future.result()


def run_of(server: Running, name: str) -> Run:
    """A server's run."""
    assert server.app is not None
    routes: list[Any] = list(server.app.routes)
    (tinker_routes,) = [
        route.endpoint.__self__
        for route in routes
        if getattr(route, "path", "") == "/api/v1/get_info"
    ]
    return tinker_routes._runs[name]


def digest(server: Running, client: Any) -> str:
    """SHA-256 of a run's adapter, once all that was asked of it is done."""
    learner = run_of(server, client.model_id).trains
    found = hashlib.sha256()
    for name, tensor in sorted(learner.adapter().tensors.items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def sampled(client: Any, seed: int, tokens: int = 8) -> tuple[list[int], list[float]]:
    """(tokens, log-probabilities) of an answer to PROMPT."""
    params = tinker.SamplingParams(max_tokens=tokens, seed=seed, stop=[])
    prompt = tinker.ModelInput.from_ints(PROMPT)
    found = client.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    (sequence,) = found.sequences
    return list(sequence.tokens), [float(x) for x in sequence.logprobs]


def scored(client: Any, answer: list[int]) -> list[float]:
    """What a run's `forward` says of an answer to PROMPT."""
    given = [datum([*PROMPT, *answer])]
    output = client.forward(given, "cross_entropy").result().loss_fn_outputs[0]
    return [float(x) for x in output["logprobs"].tolist()][len(PROMPT) - 1 :]


def outputs(content: bytes) -> Any:
    """A response to `forward_backward`."""
    found = messages.ForwardBackwardOutput()
    found.ParseFromString(content)
    return found
