"""A few hundred hostile requests (`hostile.py`)."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from starlette.routing import Route

pytest.importorskip("tinker")

from .helpers import Running, serving
from .hostile import HONEST, LIMITS, Case, Hostile, check_result, numbered, result, run, sent
from .hostile_routes import new_world


@pytest.fixture(scope="module")
def open_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that trains, within narrow limits."""
    state = tmp_path_factory.mktemp("hostile") / "state"
    with serving(folder / "base", limits=LIMITS, state=state) as server:
        yield server


@pytest.mark.slow
def test_hostile_requests_are_refused_in_one_line(open_server: Running) -> None:
    found = run(open_server, 300, 1)
    assert {200, 400, 404} <= found.statuses.keys()
    assert 50 < found.statuses[200] < 200
    assert found.worlds >= 2
    assert all(claim.holds for claim in result(found).claims)


@pytest.mark.slow
def test_the_requests_that_they_are_made_of_are_answered(open_server: Running) -> None:
    """All of them, in an order in which nothing is gone before it is asked for."""
    world = new_world(open_server)
    with httpx.Client(timeout=60) as client:
        for each in sorted(world.routes, key=lambda each: each.route.endswith("unload_model")):
            if each.route.endswith("finish"):
                continue
            body, number = each.body, None
            if each.number is not None:
                number = world.counts[each.number]
                world.counts[each.number] += 1
                body = numbered(each, number)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            path = each.path(each.given) + (f"?{urlencode(each.query)}" if each.query else "")
            case = Case(each, each.method, path, content, {}, number)
            found = sent(open_server, client, case)
            assert found.status_code in (200, 204), f"{case}: {found.text}"
            if "request_id" in found.text and each.number == "run":
                check_result(world, case, found.json()["request_id"])
    world.end()


def test_every_route_is_among_those_that_hostile_requests_are_made_of(
    open_server: Running,
) -> None:
    assert open_server.app is not None
    world = new_world(open_server)
    made = {(each.method, each.route) for each in world.routes}
    world.end()
    routes = [route for route in open_server.app.routes if isinstance(route, Route)]
    there = {(method, route.path) for route in routes for method in route.methods or ()}
    refused = {(method, path) for method, path in there if path.endswith("/{path:path}")}
    assert {each for each in there - refused if each[0] != "HEAD"} == made


def test_negative_control_a_fault_of_the_server(
    open_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is answered in OpenAI's words all the same, and says nothing of itself."""

    def broken(*_: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("isobit.serve.openai.sampling_of", broken)
    response = open_server.post(*HONEST)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the server failed; its log says why"
    counted = 'isobit_requests_total{route="/v1/completions",status="500",tenant="0"} 1.0'
    assert counted in open_server.get("/metrics").text
    with httpx.Client(timeout=60) as client:
        hostile = Hostile(open_server, client, 1)
        with pytest.raises(AssertionError, match="500"):
            _ = [hostile.step() for _ in range(200)]


@pytest.mark.slow
def test_negative_control_a_fault_of_a_run(
    open_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is seen in the future of a request, which says that it is the server's."""

    def broken(*_: object) -> None:
        raise KeyError("a fault")

    with httpx.Client(timeout=60) as client:
        hostile = Hostile(open_server, client, 1)
        hostile.step()
        monkeypatch.setattr("isobit.serve.tinker.training.read_batch", broken)
        with pytest.raises(AssertionError, match="the server failed"):
            _ = [hostile.step() for _ in range(240)]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["openai", "tinker.training"])
def test_negative_control_a_wrong_answer(
    open_server: Running, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of sampling, and of a run's adapter: another one each time."""
    calls = iter(range(10**6))
    module: Any = __import__(f"isobit.serve.{where}", fromlist=["_"])
    if where == "openai":
        real = module.sampling_of

        def other(*given: Any) -> Any:
            found = real(*given)
            object.__setattr__(found, "seed", found.seed + next(calls))
            return found

        monkeypatch.setattr(module, "sampling_of", other)
    else:
        learner = module.StepwiseLearner
        step = learner.optim_step

        def faster(self: Any, adam: Any) -> Any:
            return step(self, replace(adam, learning_rate=1e-3 * (1 + next(calls))))

        monkeypatch.setattr(learner, "optim_step", faster)
    with pytest.raises(AssertionError, match=r"then|another"):
        run(open_server, 300, 1)


@pytest.mark.slow
def test_hostile_requests_to_a_server_that_trains_the_whole_model(
    folder: Path, tmp_path: Path
) -> None:
    """Its honest runs end with the same weights, by which an honest request is answered as
    before."""
    with serving(folder / "base", limits=LIMITS, state=tmp_path / "state", whole=True) as server:
        found = run(server, 260, 2)
    assert {200, 400, 404} <= found.statuses.keys()
    assert found.worlds >= 2
    assert all(claim.holds for claim in result(found, whole=True).claims)
