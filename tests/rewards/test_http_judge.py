"""The recipe of docs/how-to/rewards.md for a judge over HTTP, against a server that loses what it
can."""

import json
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from isobit.config import load_config
from isobit.run.completions import COMPLETIONS, read
from isobit.run.directory import read_jsonl
from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.spec import RewardSpec
from isobit.training.train import train
from tests.documents import PAGES, parsed, reader_folder, run

PAGE = next(page for page in PAGES if page.name == "rewards.md")
KEY = "a key"
MOST_LOSSES = 3


def code(text: str) -> int:
    return zlib.crc32(text.encode())


def hopeless(text: str) -> bool:
    """Whether the judge never answers about it."""
    return code(text) % 7 == 0


def score(text: str) -> float:
    return code(text) % 10 / 10


class Judge(BaseHTTPRequestHandler):
    """Loses up to MOST_LOSSES requests about each completion, in ways that depend on it and on
    nothing else."""

    asked: Counter[str] = Counter()
    refused = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["completion"]
        with self.lock:
            self.asked[text] += 1
            count = self.asked[text]
        if self.headers["Authorization"] != f"Bearer {KEY}":
            Judge.refused += 1
            self.send_error(401)
        elif hopeless(text) or count <= code(text + "losses") % (MOST_LOSSES + 1):
            self.lose(code(f"{text} {count}") % 5)
        else:
            self.answer(json.dumps({"score": score(text)}))

    def lose(self, way: int) -> None:
        if way == 0:
            self.connection.close()
        elif way == 1:
            self.rfile.read(1)  # until the client waits no longer
        elif way == 2:
            self.answer("<html>busy</html>")
        else:
            self.send_error(429 if way == 3 else 500)

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def handle(self) -> None:
        with suppress(OSError, ValueError):  # a connection that was closed on purpose
            super().handle()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Judge.asked, Judge.refused = Counter(), 0
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield
    server.shutdown()
    server.server_close()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A folder with the page's files, and no patience."""
    for block in parsed(PAGE.read_text(encoding="utf-8")):
        if block.title in ("rows.jsonl", "judge.py", "judged.yaml"):
            hasty = block.text.replace("TIMEOUT_S = 20.0", "TIMEOUT_S = 1.0").replace(
                "WAIT_S = 1.0", "WAIT_S = 0.01"
            )
            (tmp_path / block.title).write_text(hasty)
    assert "TIMEOUT_S = 1.0" in (tmp_path / "judge.py").read_text()
    assert "WAIT_S = 0.01" in (tmp_path / "judge.py").read_text()
    return tmp_path


TEXTS = [f"completion {i}" for i in range(48)]


@pytest.mark.slow
def test_no_reward_is_lost_that_the_judge_would_give(recipe: Path, judge: None) -> None:
    """Batches with a hopeless completion fail as a whole; each of the others has its reward, in
    several batches on the same workers."""
    assert 2 < sum(map(hopeless, TEXTS)) < 20
    specs = [RewardSpec(f"{recipe}/judge.py:judged", deadline_s=60)]
    options = {"num_workers": 4, "on_error": "skip", "environment": ["JUDGE_URL", "JUDGE_API_KEY"]}
    with RewardPool(specs, chunk_size=16, **options) as pool:  # type: ignore[arg-type]
        for _ in range(2):
            rewards = pool.score(TEXTS, TEXTS, [{}] * len(TEXTS))
            assert [r.total for r in rewards] == [None if hopeless(t) else score(t) for t in TEXTS]
            assert [r.error is not None for r in rewards] == [hopeless(t) for t in TEXTS]
    assert max(Judge.asked[text] for text in TEXTS if not hopeless(text)) > 1


@pytest.mark.slow
def test_negative_control_without_retries_rewards_are_lost(recipe: Path, judge: None) -> None:
    source = (recipe / "judge.py").read_text()
    (recipe / "judge.py").write_text(source.replace("RETRIES = 4", "RETRIES = 0"))
    specs = [RewardSpec(f"{recipe}/judge.py:judged")]
    with RewardPool(specs, on_error="skip", environment=["JUDGE_URL", "JUDGE_API_KEY"]) as pool:
        rewards = pool.score(TEXTS, TEXTS, [{}] * len(TEXTS))
    assert sum(r.total is None for r in rewards) > sum(map(hopeless, TEXTS))
    assert all(r.total in (None, score(t)) for r, t in zip(rewards, TEXTS))


@pytest.mark.slow
def test_a_run_goes_on_and_counts_what_has_no_reward(
    recipe: Path, judge: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's own config; its metrics count the completions that the judge said nothing
    about."""
    reader_folder(recipe)
    monkeypatch.chdir(recipe)
    values = yaml.safe_load((recipe / "judged.yaml").read_text())
    (recipe / "judged.yaml").write_text(
        yaml.safe_dump({**values, "run": {"dir": "run", "report": False}})
    )
    train(load_config(recipe / "judged.yaml"))
    recorded = list(read(recipe / "run" / COMPLETIONS))
    assert recorded
    assert all(
        s["reward"] == (None if hopeless(s["completion"]) else score(s["completion"]))
        for s in recorded
    )
    assert any(hopeless(s["completion"]) for s in recorded)
    unscored = sum(row["groups/unscored"] for row in read_jsonl(recipe / "run" / "metrics.jsonl"))
    assert unscored == sum(hopeless(sample["completion"]) for sample in recorded)


@pytest.mark.slow
def test_eval_passes_on_the_variables_that_it_is_told(recipe: Path, judge: None) -> None:
    command = "isobit eval --data rows.jsonl --completions said --reward judge.py:judged"
    passed = run(f"{command} rewards.environment=[JUDGE_URL,JUDGE_API_KEY]", recipe)
    assert passed.returncode == 0, passed.stderr
    assert Judge.refused == 0
    assert sum(Judge.asked.values()) >= 3
    lacking = run(f"{command} rewards.environment=JUDGE_URL", recipe)
    assert "JUDGE_API_KEY is set here, and passed on where it is named in rewards.environment" in (
        lacking.stdout + lacking.stderr
    )
