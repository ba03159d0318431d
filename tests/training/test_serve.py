"""A run that serves its policy: its own bits stay what they are, and an answer has the bits of the
weights that it names."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from isobit.config import load_config
from isobit.errors import IsobitError, RunFailed
from isobit.kernels.native import build
from isobit.model import Model
from isobit.run.checkpoints import all_checkpoints
from isobit.run.directory import read_jsonl
from isobit.training.rollouts.serving import Allowance, Serving
from isobit.training.train import TrainResult, resume, train
from tests.ports import free_port
from tests.runs import fingerprint, write_config
from tests.serve.helpers import base_model

KEY = "test-token-0123456789"
ASKED: dict[str, Any] = {"prompt": "1+1=", "max_tokens": 8, "return_token_ids": True}
REWARD = '''
import json, pathlib, urllib.request

HERE = pathlib.Path(__file__).parent


def digits(prompts, completions, trainer_state, **columns):
    """The share of digits above 4. Where the run serves, it asks the policy while the run waits."""
    if (HERE / "port").exists():
        request = urllib.request.Request(
            f"http://127.0.0.1:{(HERE / 'port').read_text()}/v1/completions",
            json.dumps(ASKED | {"seed": 5, "logprobs": 0}).encode(),
            {"Authorization": "Bearer KEY", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = response.read().decode()
        with (HERE / "heard.jsonl").open("a") as file:
            file.write(json.dumps([trainer_state.global_step, json.loads(answer)]) + "\\n")
    return [sum(c in "56789" for c in text) / 3 for text in completions]
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    build.library()
    return base_model(tmp_path_factory.mktemp("served") / "base")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[str, Any]:
    """What a run without a server leaves."""
    folder = tmp_path_factory.mktemp("alone")
    train(load_config(config(folder, base)), quiet=True)
    return left_by(folder / "run")


def left_by(run: Path) -> dict[str, Any]:
    """What a run leaves: its `fingerprint`, without the size of the caches, to which that of the
    server's engine is added."""
    found = fingerprint(run)
    rows = json.loads(found["metrics"])
    for row in rows:
        row.pop("memory/kv_cache_mib", None)
    return found | {"metrics": rows}


def config(folder: Path, base: Path, port: int | None = None, **changes: Any) -> Path:
    """A run whose reward asks the policy where there is a port."""
    (folder / "reward.py").write_text(REWARD.replace("ASKED", repr(ASKED)).replace("KEY", KEY))
    if port is not None:
        (folder / "port").write_text(str(port))
        (folder / "tokens").write_text(KEY)
        (folder / "tokens").chmod(0o600)
        changes["serve"] = {"port": port, "token": str(folder / "tokens")} | changes.get(
            "serve", {}
        )
    changes.setdefault("optimizer", {"learning_rate": 0.02})
    changes["run"] = {"checkpoint_every": 1, "keep_last": 9} | changes.get("run", {})
    reward = {"function": f"{folder / 'reward.py'}:digits"}
    return write_config(folder, base, rewards={"functions": [reward]}, **changes)


class Client:
    """Asks again and again, in a thread, until it is told to stop."""

    def __init__(self, port: int, route: str, **asked: Any) -> None:
        self.answers: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self._url, self._asked = f"http://127.0.0.1:{port}{route}", asked
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        seed = 0
        while not self._stop.is_set():
            seed += 1
            try:
                found = httpx.post(
                    self._url,
                    json={**self._asked, "seed": seed},
                    headers={"Authorization": f"Bearer {KEY}"},
                    timeout=60,
                )
            except httpx.HTTPError:  # it does not listen yet, or no more
                time.sleep(0.05)
                continue
            self.statuses.append(found.status_code)
            if found.status_code == 200 and not self._asked.get("stream"):
                self.answers.append(found.json())

    def __enter__(self) -> "Client":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join(60)


@contextmanager
def clients(port: int) -> Iterator[list[Client]]:
    """Some that ask for different things at the same time, and one that stops in the middle of its
    request."""
    chat = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 6}
    chat |= {"prompt_logprobs": 2}
    with (
        Client(port, "/v1/completions", **ASKED, logprobs=0, n=2) as first,
        Client(port, "/v1/chat/completions", **chat, return_token_ids=True, logprobs=True) as two,
        Client(port, "/v1/completions", **ASKED, stream=True) as three,
    ):
        half, stop = (
            b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n",
            threading.Event(),
        )
        stalled = threading.Thread(target=stall, args=(port, half, stop))
        stalled.start()
        try:
            yield [first, two, three]
        finally:
            stop.set()
            stalled.join()


def stall(port: int, half: bytes, stop: threading.Event) -> None:
    """Connect, once somebody listens, send half a request, and wait."""
    while not stop.is_set():
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(half)
                stop.wait()
        except OSError:
            stop.wait(0.05)


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    found = choice["logprobs"]
    return (
        [each["logprob"] for each in found["content"]]
        if "content" in found
        else found["token_logprobs"]
    )


def sequences(answer: dict[str, Any]) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, tokens, log-probabilities) of each choice."""
    return [
        (
            answer.get("prompt_token_ids") or choice["prompt_token_ids"],
            choice["token_ids"],
            logprobs_of(choice),
        )
        for choice in answer["choices"]
    ]


def scores_of(answer: dict[str, Any], prompt: list[int]) -> list[float]:
    """Of the tokens of a prompt, from the second one on, if they were asked for."""
    told = zip(prompt[1:], (answer.get("prompt_logprobs") or [])[1:])
    return [each[str(token)]["logprob"] for token, each in told]


def assert_bits(answers: list[dict[str, Any]], run: Path, base: Path | None = None) -> None:
    """Log-probabilities are those of the checkpoint of their version, an adapter of `base` where
    that is given, and of no other."""
    models = {
        int(path.name.rpartition("-")[2]): Model.load(path, "fp8", "native")
        if base is None
        else Model.load(base, "fp8", "native", adapter=path)
        for path in all_checkpoints(run / "checkpoints")
    }
    for answer in answers:
        version = answer["weights_version"]
        for prompt, tokens, told in sequences(answer):
            for step, model in models.items():
                (found,) = model.logprobs([[*prompt, *tokens]])
                equal = torch.equal(found[len(prompt) - 1 :], torch.tensor(told))
                assert equal == (step == version), (step, version)
                if scores := scores_of(answer, prompt):
                    equal = torch.equal(found[: len(prompt) - 1], torch.tensor(scores))
                    assert equal == (step == version), (step, version)


@pytest.mark.slow
def test_nothing_of_the_run_changes_and_answers_have_their_weights_bits(
    tmp_path: Path, base: Path, alone: dict[str, Any]
) -> None:
    port = free_port()
    with clients(port) as asking:
        result = train(load_config(config(tmp_path, base, port)), quiet=True)
    assert left_by(tmp_path / "run") == alone
    heard = [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()]
    assert {step for step, _ in heard} == {0, 1, 2, 3}
    assert all(step == answer["weights_version"] for step, answer in heard)
    first, chat, streamed = asking
    answers = [*first.answers[-3:], *chat.answers[-3:], *(answer for _, answer in heard)]
    assert {answer["weights_version"] for answer in answers} == {0, 1, 2, 3}
    assert_bits(answers, tmp_path / "run")
    assert all(len(scores_of(each, each["prompt_token_ids"])) > 3 for each in chat.answers)
    statuses = [*first.statuses, *chat.statuses, *streamed.statuses]
    assert set(statuses) <= {200, 503}
    answered = sum(row.get("serve/requests", 0) for row in result.metrics)
    assert answered >= statuses.count(200) + len(heard)
    assert sum(row["serve/tokens"] for row in result.metrics[-4:]) >= 8 * len(heard)


@pytest.mark.slow
def test_an_adapter_s_answers_have_its_bits(tmp_path: Path, base: Path) -> None:
    given = config(tmp_path, base, free_port(), adapter={"rank": 4}, steps=3)
    train(load_config(given), quiet=True)
    heard = [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()]
    later = [answer for step, answer in heard if step]  # B is zero before the first
    assert {answer["weights_version"] for answer in later} == {1, 2}
    assert_bits(later, tmp_path / "run", base)


def test_negative_control_a_server_that_touches_a_weight_is_seen(
    tmp_path: Path, base: Path, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = Serving.settle

    def touching(self: Serving) -> None:
        settle(self)
        next(iter(self.engine.model.parameters())).data.view(-1)[0] += 2**-20

    monkeypatch.setattr(Serving, "settle", touching)
    given = config(tmp_path, base, free_port())
    (tmp_path / "port").unlink()
    with pytest.raises(RunFailed, match="changed in memory"):
        train(load_config(given), quiet=True)
    train(
        load_config(given, ["run.check_memory=false", f"run.dir={tmp_path / 'other'}"]), quiet=True
    )
    assert left_by(tmp_path / "other")["model.safetensors"] != alone["model.safetensors"]


@pytest.mark.slow
def test_a_run_that_is_interrupted_ends_and_goes_on(
    tmp_path: Path, base: Path, alone: dict[str, Any]
) -> None:
    """A client that waits, longer than the weights last, is told so; on another port the run goes
    on to the same end."""
    port, again = free_port(), free_port()

    def on_step(step: int, metrics: Any) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    long = {"prompt": "1", "max_tokens": 200, "n": 200}
    with Client(port, "/v1/completions", **long, ignore_eos=True) as client:
        given = config(tmp_path, base, port, serve={"share": 1e-6})
        (tmp_path / "port").unlink()
        stopped = train(load_config(given), quiet=True, callbacks=[on_step])
    assert stopped.exit_code == 130
    assert stopped.metrics[-1]["step"] == 2
    assert set(client.statuses) == {503}
    (tmp_path / "port").write_text(str(again))
    resumed = resume(tmp_path / "run", [f"serve.port={again}"], quiet=True)
    assert resumed.exit_code == 0
    assert left_by(tmp_path / "run") == alone
    assert (tmp_path / "heard.jsonl").read_text().count('"weights_version": 3') > 0


def run_with(folder: Path, base: Path, **changes: Any) -> TrainResult:
    return train(load_config(config(folder, base, **changes)), quiet=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": 2}, "serve.port: only a run of one process serves its policy yet"),
        ({"fleet": {"engines": 1}}, "serve.port: only a run of one process serves its policy yet"),
        ({"consistency": "fast"}, "serve.port needs consistency: bitwise or exact"),
        (
            {"precision": "fp8[kv_cache=e4m3-calibrated]"},
            "the KV cache is calibrated on data of the run",
        ),
        ({"serve": {"share": 1}}, "serve.share: expected below 1"),
        ({"serve": {"token": "/proc/nothing"}}, "serve.token /proc/nothing: cannot be made"),
        ({"serve": {"port": 65536}}, "serve.port: expected at most 65,535"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    tmp_path: Path, base: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(IsobitError) as refused:
        run_with(tmp_path, base, port=free_port(), **changes)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_port_in_use(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed before the model is read; the control: at a free one the model is."""

    def read(*_: object, **__: object) -> None:
        raise IsobitError("it is read")

    monkeypatch.setattr("isobit.training.parts.assembly.load_trained", read)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(IsobitError, match=rf"^serve\.port {port}: cannot listen on 127"):
            run_with(tmp_path, base, port=port)
    for _ in range(2):  # and is free again when the run cannot be opened
        with pytest.raises(IsobitError, match=r"^it is read$"):
            run_with(tmp_path, base, port=port)
    assert not (tmp_path / "run").exists()


def test_without_its_packages(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("isobit.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(IsobitError, match=r"serve.port needs uvicorn: pip install .*uvicorn"):
        run_with(tmp_path, base, port=free_port())


def test_several_prompts_and_other_routes_are_refused(tmp_path: Path, base: Path) -> None:
    """Versions could differ between answers, and Tinker's clients are pinned to one."""
    port, found = free_port(), dict[str, httpx.Response]()

    def ask() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"http://127.0.0.1:{port}"
        found["two"] = httpx.post(
            f"{url}/v1/completions", json={"prompt": ["1", "2"]}, headers=headers
        )
        found["tinker"] = httpx.get(f"{url}/api/v1/get_server_capabilities", headers=headers)
        found["nobody"] = httpx.get(f"{url}/v1/models")
        found["models"] = httpx.get(f"{url}/v1/models", headers=headers)

    def on_step(step: int, metrics: Any) -> None:
        if step == 1:
            ask()  # by the run's own thread: these wait for no step

    given = load_config(config(tmp_path, base, port, steps=1))
    train(given, quiet=True, callbacks=[on_step])
    assert found["two"].status_code == 400
    assert "give one at a time to a run that trains" in found["two"].json()["error"]["message"]
    assert found["tinker"].status_code == 404
    assert found["nobody"].status_code == 401
    assert [each["id"] for each in found["models"].json()["data"]] == ["run"]
    rows = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert rows[-1]["time/serve"] > 0


def test_time_is_given_by_share() -> None:
    """Over many steps requests take their share and a last piece of work; what is not used is kept
    for one step."""
    now = [0.0]
    allowance = Allowance(0.25, lambda: now[0])

    def work() -> None:
        now[0] += 0.5

    for _ in range(100):
        allowance.step()
        now[0] += 3.0
        allowance.earn()
        while allowance.left > 0:
            allowance.spend(work)
    assert allowance.used == pytest.approx(100.0, abs=0.5)
    assert now[0] == pytest.approx(400.0, abs=0.5)
    for _ in range(100):  # nobody asks
        allowance.step()
        now[0] += 3.0
    allowance.earn()
    assert allowance.left == pytest.approx(2.0, abs=0.5)
    allowance.spend(work, free=True)
    assert allowance.left == pytest.approx(2.0, abs=0.5)


def test_what_other_threads_take_is_of_the_share() -> None:
    """Texts take at most half of it in the end, and requests the rest, however much is asked; each
    second of theirs is told. The control asks for no texts."""
    for texts, most in ((True, 50.0), (False, 0.0)):
        now, charged, computed = [0.0], 0.0, 0.0
        allowance = Allowance(0.25, lambda now=now: now[0])  # type: ignore[misc]

        def work(now: list[float] = now) -> None:
            now[0] += 0.5

        for _ in range(100):
            allowance.step()
            for _ in range(6):
                now[0] += 0.5
                if texts and allowance.open():
                    allowance.charge(2.0)  # a long text, in another thread
                    charged += 2.0
                allowance.earn()
                while allowance.left > 0:
                    allowance.spend(work)
                    computed += 0.5
        assert allowance.used == pytest.approx(charged + computed)
        assert charged <= most + 2.5
        assert charged + computed <= 100.0 + 3.0
        assert computed >= 100.0 - most - 3.0


def test_a_text_waits_until_its_time_has_come() -> None:
    """By the clock alone: also while nobody counts, as in a long update."""
    now = [0.0]
    allowance = Allowance(0.25, lambda: now[0])
    assert allowance.open()
    allowance.charge(1.0)
    assert not allowance.open()
    now[0] = 5.0
    assert not allowance.open()
    now[0] = 5.5
    assert allowance.open()
    allowance.earn()
    assert allowance.open()
    assert allowance.left == pytest.approx(5.5 / 6)
