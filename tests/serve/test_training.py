"""Tinker's own client, unmodified, trains: log-probabilities of sampling and of training have the
same bits, and a run's weights do not depend on what else the server does."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from .helpers import KEY, OTHER_KEY, Running

tinker: Any = pytest.importorskip("tinker")

from isobit.serve.tinker import sampling  # noqa: E402

from .training import (  # noqa: E402
    PROMPT,
    data,
    datum,
    digest,
    run_of,
    sampled,
    scored,
    train,
)


@pytest.fixture(scope="module")
def service(trainer: Running) -> Iterator[Any]:
    client = tinker.ServiceClient(base_url=trainer.url, api_key=KEY)
    yield client
    client.close("success").result()


@pytest.fixture(scope="module")
def other(trainer: Running) -> Iterator[Any]:
    """Another tenant."""
    client = tinker.ServiceClient(base_url=trainer.url, api_key=OTHER_KEY)
    yield client
    client.close("success").result()


def new(service: Any, seed: int = 1, rank: int = 4) -> Any:
    return service.create_lora_training_client(base_model="tiny", rank=rank, seed=seed).result()


def test_what_a_run_is(service: Any, trainer: Running) -> None:
    client = new(service, rank=3)
    info = client.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 3, "tiny")
    assert info.model_data.tokenizer_id == str(trainer.gateway.model.directory)
    assert client.get_tokenizer().encode("abc") == trainer.gateway.tokenizer.encode("abc")
    assert all(model.trainable for model in service.get_server_capabilities().supported_models)
    assert digest(trainer, client) == digest(trainer, new(service, rank=3))
    assert digest(trainer, client) != digest(trainer, new(service, seed=2, rank=3))
    attention = service.create_lora_training_client(
        base_model="tiny", rank=3, train_mlp=False
    ).result()
    names = run_of(trainer, attention.model_id).trains.adapter().tensors
    assert {name.split(".")[-2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_sampling_has_the_bits_of_forward_while_others_train(service: Any, other: Any) -> None:
    """Three runs of two tenants train and sample at once. The control is the snapshot of one step
    before."""

    def one(seed: int) -> None:
        client = new((service, other)[seed % 2], seed)
        for step in range(3):
            sampler = client.save_weights_and_get_sampling_client().result()
            answer, logprobs = sampled(sampler, seed=10 * seed + step)
            assert scored(client, answer) == logprobs
            train(client, seed, 1)
            assert scored(client, answer) != logprobs

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, (1, 2, 3)))


def test_a_run_ends_with_the_same_adapter_alone_and_among_others(
    service: Any, other: Any, trainer: Running
) -> None:
    """Others, another tenant's too, train and sample meanwhile; the control is another run's."""

    def one(seed: int) -> str:
        client = new((service, other)[seed % 2], seed)
        sampler = client.save_weights_and_get_sampling_client().result()
        asked = [sampler.sample(tinker.ModelInput.from_ints(PROMPT), 2, PARAMS) for _ in range(2)]
        train(client, seed, 2)
        for future in asked:
            future.result()
        return digest(trainer, client)

    alone = one(1)
    with ThreadPoolExecutor(4) as pool:
        among = list(pool.map(one, (1, 2, 3, 1)))
    assert among[0] == among[3] == alone
    assert len(set(among)) == 3


PARAMS = tinker.SamplingParams(max_tokens=12, seed=5)


@pytest.mark.slow
def test_open_requests_keep_their_snapshot(service: Any, trainer: Running) -> None:
    """A request that is open while its run steps has the answer that it has alone; the control is a
    new sampling client."""
    client = new(service)
    train(client, 1, 1)
    old = client.save_weights_and_get_sampling_client().result()
    alone = sampled(old, seed=3, tokens=60)
    with ThreadPoolExecutor(2) as pool:
        opened = [pool.submit(sampled, old, 3, 60) for _ in range(2)]
        train(client, 2, 2)
        assert [one.result() for one in opened] == [alone, alone]
    fresh = client.save_weights_and_get_sampling_client().result()
    assert sampled(fresh, seed=3, tokens=60) != alone


def test_a_custom_loss_has_the_gradient_of_autograd(service: Any, trainer: Running) -> None:
    """A linear custom loss moves the adapter as cross_entropy of its weights does; the control is a
    loss with other weights."""

    def weighted(factor: float) -> Any:
        def loss(given: list[Any], logprobs: list[torch.Tensor]) -> Any:
            return -factor * sum(each.sum() for each in logprobs), {"tokens:sum": 1.0}

        return loss

    found = []
    for factor in (1.0, 0.5):
        custom = new(service)
        output = custom.forward_backward_custom(data(7), weighted(factor)).result()
        custom.optim_step(tinker.AdamParams(learning_rate=1e-2, eps=1.0)).result()
        assert output.metrics["tokens:sum"] == 1.0
        found.append(digest(trainer, custom))
    plain = new(service)
    plain.forward_backward(data(7), "cross_entropy").result()
    plain.optim_step(tinker.AdamParams(learning_rate=1e-2, eps=1.0)).result()
    assert digest(trainer, plain) == found[0] != found[1]


def test_several_calls_before_a_step_are_one_call_with_all_data(
    service: Any, trainer: Running
) -> None:
    """Within rounding: boundaries of packs differ. The control drops one of the calls."""
    adapters = []
    for parts in ([data(3) + data(4)], [data(3), data(4)], [data(3)]):
        client = new(service)
        calls = [client.forward_backward(part, "cross_entropy") for part in parts]
        norm = client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result().metrics
        assert sum(len(call.result().loss_fn_outputs) for call in calls) == sum(map(len, parts))
        adapters.append(norm["grad_norm"])
    assert adapters[1] == pytest.approx(adapters[0], rel=1e-2)
    assert adapters[2] != pytest.approx(adapters[0], rel=1e-1)


@pytest.mark.parametrize(
    ("given", "loss", "said"),
    [
        ([datum([5, 6, 7], [1.0, float("nan")])], "cross_entropy", "weights"),
        ([datum([5, 6, 99999])], "cross_entropy", "vocabulary"),
        ([datum([5, 6, 7], [1.0])], "cross_entropy", "shape"),
        ([datum([5, 6, 7])], "stable_reinforce", "stable_reinforce"),
        ([datum(list(range(5, 60)) * 6)], "cross_entropy", "256"),
        ([datum([5, 6, 7])], "importance_sampling", "missing"),
    ],
    ids=["nan", "vocabulary", "shape", "loss", "long", "missing"],
)
def test_a_poisonous_request_ends_itself_alone(
    service: Any, trainer: Running, given: list[Any], loss: str, said: str
) -> None:
    """Its run goes on as if it had not come, and the requests that wait behind it are done."""
    clean, poisoned = new(service), new(service)
    bad = poisoned.forward_backward(given, loss)
    for client in (clean, poisoned):
        client.forward_backward(data(1), "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    with pytest.raises(tinker.RequestFailedError, match=said) as caught:
        bad.result()
    assert caught.value.category == tinker.types.RequestErrorCategory.User
    assert digest(trainer, poisoned) == digest(trainer, clean)


def test_what_is_not_offered_is_refused_in_one_line(service: Any) -> None:
    client = new(service)
    with pytest.raises(
        tinker.RequestFailedError, match="kind: a sampling client whose weights change: not served"
    ):
        client.save_weights_and_get_sampling_client(kind="inflight").result()
    with pytest.raises(tinker.BadRequestError, match="unembedding alone is not offered"):
        service.create_lora_training_client(
            base_model="tiny", rank=4, train_mlp=False, train_attn=False
        ).result()
    with pytest.raises(tinker.NotFoundError, match="model 'other' is not served"):
        service.create_lora_training_client(base_model="other", rank=4).result()
    with pytest.raises(tinker.BadRequestError, match="another optimizer than AdamW: not served"):
        service.create_lora_training_client(
            base_model="tiny", rank=4, optimizer=tinker.types.DimuonOptimizerConfig()
        ).result()
    step = tinker.AdamParams(learning_rate=-1.0)
    with pytest.raises(tinker.RequestFailedError, match="learning_rate: expected a number from 0"):
        client.optim_step(step).result()


@pytest.mark.slow
def test_snapshots_that_nobody_holds_are_dropped(trainer: Running) -> None:
    served = trainer.gateway.model.transformer.served
    assert served is not None
    before = set(served.names)
    service = tinker.ServiceClient(base_url=trainer.url, api_key=KEY)
    client = new(service)
    samplers = [client.save_weights_and_get_sampling_client().result() for _ in range(18)]
    assert len(set(served.names) - before) == 16
    with pytest.raises(tinker.NotFoundError, match="16 newer ones of its run were made"):
        sampled(samplers[0], seed=1)
    assert sampled(samplers[2], seed=1) == sampled(samplers[17], seed=1)
    service.close("success").result()
    assert set(served.names) == before


@pytest.mark.slow
def test_saved_weights_go_on_where_they_were(service: Any, trainer: Running) -> None:
    """With the optimizer's state a new run ends as the old one; the control is without it."""
    client = new(service)
    train(client, 1, 2)
    path = client.save_state("here", user_metadata={"step": "2"}).result().path
    assert path == f"tinker://{client.model_id}/weights/here"
    train(client, 2, 2)
    whole = service.create_training_client_from_state_with_optimizer(path).result()
    bare = service.create_training_client_from_state(path).result()
    assert digest(trainer, whole) == digest(trainer, bare) != digest(trainer, client)
    assert whole.get_info().lora_rank == 4
    for one in (whole, bare):
        train(one, 2, 2)
    assert digest(trainer, whole) == digest(trainer, client) != digest(trainer, bare)
    run = new(service)
    run._load_state_impl(path, optimizer=True, weights_access_token=None).result()
    train(run, 2, 2)
    assert digest(trainer, run) == digest(trainer, client)


def test_what_is_wrong_with_saved_weights(service: Any, other: Any) -> None:
    client = new(service)
    path = client.save_state("once").result().path
    with pytest.raises(tinker.RequestFailedError, match="'once' is there already"):
        client.save_state("once").result()
    assert client.save_state("once", overwrite=True).result().path == path
    with pytest.raises(tinker.RequestFailedError, match="expected a name of at most 100 letters"):
        client.save_state("../up").result()
    for service_of, given in ((other, path), (service, path + "x")):
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            service_of.create_training_client_from_state(given).result()
    sampler = client.save_weights_for_sampler("s").result().path
    with pytest.raises(tinker.BadRequestError, match="without the optimizer's state"):
        service.create_training_client_from_state_with_optimizer(sampler).result()
    larger = new(service, rank=5)
    with pytest.raises(tinker.RequestFailedError, match="this run trains"):
        larger._load_state_impl(path, optimizer=False, weights_access_token=None).result()


def test_saved_weights_are_sampled_from(service: Any, other: Any, trainer: Running) -> None:
    """They have the bits of the run when they were saved; the control is the run now. Two clients
    of one path share its snapshot."""
    client = new(service)
    train(client, 1, 1)
    path = client.save_weights_for_sampler("then").result().path
    assert path == f"tinker://{client.model_id}/sampler_weights/then"
    now = sampled(client.save_weights_and_get_sampling_client().result(), seed=4)
    assert scored(client, now[0]) == now[1]
    train(client, 2, 1)
    served = trainer.gateway.model.transformer.served
    assert served is not None
    before = set(served.names)
    clients = [service.create_sampling_client(model_path=path).result() for _ in range(2)]
    assert [sampled(each, seed=4) for each in clients] == [now, now]
    assert len(set(served.names) - before) == 1
    later = client.save_weights_and_get_sampling_client().result()
    assert sampled(later, seed=4) != now
    info = tinker.RestClient(base_url=trainer.url, api_key=KEY)
    found = info.get_weights_info_by_tinker_path(path).result()
    assert (found.base_model, found.lora_rank, found.train_mlp, found.train_unembed) == (
        *("tiny", 4, True),
        False,
    )
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        sampled(other.create_sampling_client(model_path=path).result(), seed=4)


@pytest.mark.slow
def test_many_clients_of_saved_weights_rest(
    service: Any, trainer: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are not in memory, and have the same answers when they are asked; the control is
    weights that are deleted, which nobody can read again."""
    monkeypatch.setattr(sampling, "_MOST_AWAKE", 2)
    client, paths = new(service), list[str]()
    for step in range(4):
        train(client, step, 1)
        paths.append(client.save_weights_for_sampler(f"s{step}").result().path)
    served = trainer.gateway.model.transformer.served
    assert served is not None
    before, samplers, answers = set(served.names), [], []
    for path in paths:
        samplers.append(service.create_sampling_client(model_path=path).result())
        answers.append(sampled(samplers[-1], seed=2))
    assert len(set(served.names) - before) == 2
    assert len({tuple(tokens) for tokens, _ in answers}) == 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda each: sampled(each, 2), samplers)) == answers
    fifth = service.create_sampling_client(model_path=paths[3]).result()
    assert sampled(fifth, seed=2) == answers[3]
    rest = tinker.RestClient(base_url=trainer.url, api_key=KEY)
    rest.delete_checkpoint_from_tinker_path(paths[0]).result()
    with pytest.raises(tinker.RequestFailedError, match="was deleted"):
        sampled(samplers[0], seed=2)
