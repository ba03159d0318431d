"""`--train full` by Tinker's own client, unmodified: one run trains all the weights of the model
that is served, and samples from them have the bits of its forward."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.model import Model
from isobit.rl.stepwise import Adam, Datum, StepwiseLearner
from isobit.serve.requests import Limits
from isobit.serve.tinker import runs
from tests.until import until

from .helpers import KEY, OTHER_KEY, Running, serving

tinker: Any = pytest.importorskip("tinker")

from .test_runs import answer, created, gradients, started, step  # noqa: E402
from .training import PROMPT, data, run_of, sampled, scored, train  # noqa: E402

Begin = Callable[..., AbstractContextManager[Running]]
STEP = tinker.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)


@pytest.fixture
def begin(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Begins a server on the same state."""
    monkeypatch.setattr("tests.serve.helpers.TOKENS", (KEY, OTHER_KEY))
    monkeypatch.setenv("TINKER_TELEMETRY", "0")

    def begun(**more: Any) -> AbstractContextManager[Running]:
        return serving(folder / "base", state=tmp_path / "state", **{"whole": True, **more})

    return begun


@pytest.fixture
def server(begin: Begin) -> Iterator[Running]:
    with begin() as running:
        running.token = KEY
        yield running


def service(server: Running, key: str = KEY) -> Any:
    return tinker.ServiceClient(base_url=server.url, api_key=key)


def new(service: Any) -> Any:
    return service.create_lora_training_client(base_model="tiny", rank=0).result()


def digest_of(model: Model) -> str:
    """SHA-256 of a model's masters."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters().items()):
        found.update(name.encode() + tensor.detach().numpy().tobytes())
    return found.hexdigest()


def digest(server: Running) -> str:
    return digest_of(server.gateway.model)


def trained_alone(folder: Path, seeds: Sequence[int], rate: float) -> str:
    """What `train` leaves, without a server."""
    model = Model.load(folder, "fp8", "native")
    learner = StepwiseLearner(model)
    for seed in seeds:
        for number in (1000 * seed, 1000 * seed + 1):
            given = [
                Datum(
                    tuple(one.model_input.to_ints()),
                    {
                        "target_tokens": torch.tensor(one.loss_fn_inputs["target_tokens"].tolist()),
                        "weights": torch.tensor(one.loss_fn_inputs["weights"].tolist()),
                    },
                )
                for one in data(number)
            ]
            learner.forward_backward(given, "cross_entropy", {})
        learner.optim_step(Adam(learning_rate=rate, grad_clip_norm=1.0))
    return digest_of(model)


@pytest.mark.slow
def test_samples_have_the_bits_of_forward_and_steps_those_of_the_learner(
    folder: Path, server: Running
) -> None:
    """The controls: weights a step older, and another rate."""
    client = new(service(server))
    info = client.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (False, None, "tiny")
    for seed in (1, 2):
        sampler = client.save_weights_and_get_sampling_client().result()
        tokens, logprobs = sampled(sampler, seed)
        assert scored(client, tokens) == logprobs
        train(client, seed, 1, rate=1e-2)
        assert scored(client, tokens) != logprobs
    assert digest(server) == trained_alone(folder / "base", (1, 2), 1e-2)
    assert digest(server) != trained_alone(folder / "base", (1, 2), 2e-2)


@pytest.mark.slow
def test_sampling_clients_are_of_the_present_weights_or_are_told_so(server: Running) -> None:
    """Those of the model as it was read, without a name, and of a path, which is there again once
    its weights are loaded. The control is what they sample while they may."""
    mine = service(server)
    base = mine.create_sampling_client(base_model="tiny").result()
    client = new(mine)
    unnamed = client.save_weights_and_get_sampling_client().result()
    path = client.save_weights_for_sampler("a").result().path
    state = client.save_state("a").result().path
    named = mine.create_sampling_client(model_path=path).result()
    before = sampled(base, seed=1)
    assert sampled(unnamed, seed=1) == sampled(named, seed=1) == before
    train(client, 1, 1)
    for old in (base, unnamed, named):
        with pytest.raises(tinker.RequestFailedError, match="these weights are not in memory"):
            sampled(old, seed=1)
    for asked in ({"base_model": "tiny"}, {"model_path": path}):
        with pytest.raises(tinker.BadRequestError, match="these weights are not in memory"):
            mine.create_sampling_client(**asked).result()
    present = client.save_weights_and_get_sampling_client().result()
    assert sampled(present, seed=1) != before
    prompt = tinker.ModelInput.from_ints(PROMPT)
    scores = present.compute_logprobs(prompt).result()
    (output,) = (
        client.forward(
            [
                tinker.Datum(
                    prompt, {"target_tokens": [*PROMPT[1:], 5], "weights": [1.0] * len(PROMPT)}
                )
            ],
            "cross_entropy",
        )
        .result()
        .loss_fn_outputs
    )
    assert scores[1:] == output["logprobs"].tolist()[:-1]
    client._load_state_impl(state, optimizer=False, weights_access_token=None).result()
    again = mine.create_sampling_client(model_path=state).result()
    assert [sampled(one, seed=1) for one in (again, base, unnamed, named)] == [before] * 4
    with pytest.raises(tinker.RequestFailedError, match="these weights are not in memory"):
        sampled(present, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("stepped", [False, True])
def test_after_a_restart_saved_weights_that_are_the_present_ones_are_sampled_from(
    begin: Begin, stepped: bool
) -> None:
    """As they were read, loaded, and after a step that is done again. The control is of those
    before the step."""
    with begin() as server:
        server.token = KEY
        client = new(service(server))
        paths = [client.save_weights_for_sampler("a").result().path]
        state = client.save_state("a").result().path
        train(client, 1, 1)
        client._load_state_impl(state, optimizer=True, weights_access_token=None).result()
        if stepped:
            train(client, 2, 1)
        paths.append(client.save_weights_for_sampler("b").result().path)
        present = service(server).create_sampling_client(model_path=paths[1]).result()
        before = sampled(present, seed=1)
    with begin() as server:
        server.token = KEY
        mine = service(server)
        assert sampled(mine.create_sampling_client(model_path=paths[1]).result(), seed=1) == before
        if stepped:
            with pytest.raises(tinker.BadRequestError, match="these weights are not in memory"):
                mine.create_sampling_client(model_path=paths[0]).result()
        else:
            old = mine.create_sampling_client(model_path=paths[0]).result()
            assert sampled(old, seed=1) == before


@pytest.mark.slow
def test_requests_before_a_step_are_finished_by_the_weights_before_it(begin: Begin) -> None:
    """More than run at once, so that some wait; those after it are of the new weights. The control
    is how many there were when the step came."""
    with begin(max_sequences=2, limits=Limits()) as server:
        client = new(service(server))
        sampler = client.save_weights_and_get_sampling_client().result()
        alone = [sampled(sampler, seed, tokens=200) for seed in range(4)]
        client.forward_backward(data(1), "cross_entropy").result()
        waiting = list[int]()
        device, optim_step = server.gateway.device, StepwiseLearner.optim_step

        def noted(self: StepwiseLearner, adam: Adam) -> Any:
            waiting.append(device.num_open + device.num_waiting)
            return optim_step(self, adam)

        with ThreadPoolExecutor(4) as pool, pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepwiseLearner, "optim_step", noted)
            opened = [pool.submit(sampled, sampler, seed, 200) for seed in range(4)]
            while device.num_open + device.num_waiting < 4:
                assert not all(one.done() for one in opened)
            asked = client.optim_step(STEP)
            assert [one.result() for one in opened] == alone
            asked.result()
        assert waiting == [0]
        fresh = client.save_weights_and_get_sampling_client().result()
        assert [sampled(fresh, seed, tokens=200) for seed in range(4)] != alone


def test_scores_of_a_prompt_and_its_answer_are_of_the_same_weights(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that comes while they are computed waits for both. The control is after it."""
    monkeypatch.setattr("isobit.serve.scoring._AT_ONCE", 4)
    client = new(service(server))
    sampler = client.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=30, seed=1, stop=[])
    prompt = tinker.ModelInput.from_ints([5, 9, 7] * 20)

    def both(of: Any) -> Any:
        asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
        return of.sample(prompt=prompt, num_samples=1, sampling_params=params, **asked)

    def told(found: Any) -> Any:
        return found.prompt_logprobs, list(found.sequences[0].logprobs)

    alone = told(both(sampler).result())
    client.forward_backward(data(1), "cross_entropy").result()
    device = server.gateway.device
    asked = both(sampler)
    until(lambda: device.num_open)
    client.optim_step(STEP).result()
    assert told(asked.result()) == alone
    fresh = client.save_weights_and_get_sampling_client().result()
    assert all(one != two for one, two in zip(told(both(fresh).result()), alone, strict=True))


@pytest.mark.slow
def test_there_is_one_run_and_the_next_begins_as_the_first(server: Running) -> None:
    mine, other = service(server), service(server, OTHER_KEY)
    client = new(mine)
    client.forward_backward(data(9), "cross_entropy").result()  # waits for no step
    for stranger in (other, mine):
        with pytest.raises(tinker.BadRequestError, match="there is room for one"):
            new(stranger)
    with pytest.raises(tinker.BadRequestError, match="no adapters; ask for rank 0"):
        other.create_lora_training_client(base_model="tiny", rank=4).result()
    with pytest.raises(tinker.BadRequestError, match="all weights are trained here, none left out"):
        other.create_lora_training_client(base_model="tiny", rank=0, train_mlp=False).result()
    answer(server, server.post("/api/v1/unload_model", {"model_id": client.model_id}))
    found = []
    for whose in (other, mine):
        client = new(whose)
        train(client, 1, 1)
        found.append(digest(server))
        whose.close("success").result()
    assert found[0] == found[1]


def test_a_run_whose_client_is_gone_makes_room(server: Running) -> None:
    """The control has just been heard of."""
    gone, mine = service(server), service(server)
    run = new(gone).model_id
    gone.holder.close()  # without a word
    run_of(server, run).session.seen = time.monotonic() - runs.SILENT_SECONDS + 30
    with pytest.raises(tinker.BadRequestError, match="until its client was silent for 120 seconds"):
        new(mine)
    run_of(server, run).session.seen = time.monotonic() - runs.SILENT_SECONDS - 1
    train(new(mine), 1, 1)


def test_openais_routes_answer_by_the_present_weights(server: Running) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "seed": 1, "logprobs": 0}

    def answered() -> Any:
        return server.post("/v1/completions", asked).json()["choices"][0]["logprobs"]

    client = new(service(server))
    before = answered()
    assert answered() == before
    train(client, 1, 1)
    assert answered() != before


@pytest.mark.slow
def test_saved_weights_are_a_models_folder_and_training_goes_on_from_it(
    server: Running, tmp_path: Path
) -> None:
    """With the optimizer's state bit for bit; the control is without it."""
    mine = service(server)
    client = new(mine)
    train(client, 1, 2)
    path = client.save_state("here").result().path
    kept = digest(server)
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    (saved,) = rest.list_user_checkpoints().result().checkpoints
    assert saved.tinker_path == path
    state = server.gateway.state
    assert state is not None
    tenant = run_of(server, client.model_id).tenant
    written = state.folder_of(state.checkpoint(tenant, path))
    assert digest_of(Model.load(written, "fp8", "native")) == kept
    assert {"config.json", "model.safetensors", "optimizer.safetensors"} <= {
        each.name for each in written.iterdir()
    }
    train(client, 2, 1)
    ends = digest(server)
    mine.close("success").result()
    found = []
    for optimizer in (True, False):
        again = service(server)
        made = (
            again.create_training_client_from_state_with_optimizer
            if optimizer
            else again.create_training_client_from_state
        )
        client = made(path).result()
        assert digest(server) == kept
        train(client, 2, 1)
        found.append(digest(server))
        again.close("success").result()
    assert found[0] == ends != found[1]


def pinned(server: Running, run: str, number: int) -> str:
    """The name of a sampling client of a run's present weights; its requests have numbers."""
    asked = {"model_id": run, "seq_id": number, "sampling_session_seq_id": number}
    found = answer(server, server.post("/api/v1/save_weights_for_sampler", asked))
    return str(found.json()["sampling_session_id"])


def drawn(server: Running, sampler: str, number: int) -> bytes:
    """What it samples, or why it does not."""
    asked = {
        "sampling_session_id": sampler,
        "seq_id": number,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 8, "seed": 3},
    }
    return answer(server, server.post("/api/v1/asample", asked)).content


@pytest.mark.slow
@pytest.mark.parametrize(("stepped", "every"), [(False, 10), (True, 10), (True, 1)])
def test_a_restart_goes_on_bit_for_bit(begin: Begin, stepped: bool, every: int) -> None:
    """With a step that was kept or is done again, gradients that wait, and a sampling client of the
    present weights. The control is one of the weights before the step, which is told that they are
    gone."""

    def first_life(server: Running) -> tuple[str, list[str]]:
        server.token = KEY
        asked = created(server, started(server), rank=0)
        run = str(answer(server, asked).json()["model_id"])
        samplers = [pinned(server, run, 1)]
        answer(server, gradients(server, run, 2, data(1)))
        if stepped:
            answer(server, step(server, run, 3))
        else:
            answer(server, gradients(server, run, 3, data(2)))
        samplers.append(pinned(server, run, 4))
        answer(server, gradients(server, run, 5, data(3)))
        return run, samplers

    with begin(every=every) as server:
        run, samplers = first_life(server)
        before, kept = drawn(server, samplers[1], 1), digest(server)
    with begin(every=every) as server:
        server.token = KEY
        assert run_of(server, run).rank is None
        assert digest(server) == kept
        assert drawn(server, samplers[1], 2) == before
        old = drawn(server, samplers[0], 2)
        assert (b"not in memory" in old) is stepped is not (old == before)
        answer(server, step(server, run, 6))
        ends = digest(server)
        answer(server, server.post("/api/v1/unload_model", {"model_id": run}))
        run, _ = first_life(server)
        answer(server, step(server, run, 6))
        assert digest(server) == ends != kept
