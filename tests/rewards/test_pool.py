"""The pool: rewards, their sum, and every way in which a function can fail, traced to its
sample."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from isobit.errors import IsobitError, RunFailed
from isobit.tasks.builtin import TaskSettings, load_task
from isobit.tasks.rewards.pool import MAX_DEATHS, Reward, RewardPool
from isobit.tasks.rewards.spec import RewardSpec
from isobit.tasks.workers.output import MAX_FILE_BYTES
from tests.rewards.conftest import HANG

FUNCTIONS = (
    """
import os, re, sys, time

def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]

def half(completions):
    return [0.5] * len(completions)

def some(completions):
    return [None if c == "bad" else 2.0 for c in completions]

def raising(completions):
    if "bad" in completions:
        print("about to fail")
        raise ValueError("no good")
    return [1.0] * len(completions)

def hanging(completions):
    if "bad" in completions:
        print("\\x1b[31mwaiting")
        hang()
    return [1.0] * len(completions)

def stuck(completions):
    if "bad" in completions:
        hang(0), re.match(r"(a+)+$", "a" * 60 + "b")  # never lets go of the interpreter
    return [1.0] * len(completions)

def exiting(completions):
    if "bad" in completions:
        print("last words")
        os._exit(3)
    return [1.0] * len(completions)

def sys_exiting(completions):
    if "bad" in completions:
        sys.exit("enough")
    return [1.0] * len(completions)

def aborting(completions):
    if "bad" in completions:
        os.abort()
    return [1.0] * len(completions)

def closing(completions):
    if "bad" in completions:
        os.closerange(3, 1 << 20)  # a pipe has the number it has in the process that opened it
    return [1.0] * len(completions)

def nan(completions):
    return [float("nan") if c == "bad" else 1.0 for c in completions]

def shorter(completions):
    return [1.0 for c in completions if c != "bad"]

def lonely(completions):
    return [1.0]

def together(completions):
    if len(completions) > 1:
        raise ValueError("one at a time")
    return [1.0]

def meeting(completions):
    if len(completions) > 1:
        raise ValueError("one at a time")
    mine = os.path.join(os.path.dirname(__file__), f"here.{os.getpid()}")
    open(mine, "w").close()
    while sum(name.startswith("here.") for name in os.listdir(os.path.dirname(__file__))) < 2:
        time.sleep(0.01)
    return [1.0]

def slow(completions):
    len(completions) > 1 and hang()
    return [1.0] * len(completions)

def printing(completions):
    print("x" * 100_000)
    print('{"values": [0.0]}', flush=True)
    os.write(1, b"raw\\n" * 1000)
    sys.stderr.write("error\\n")
    sys.__stdout__.write("more")
    return [1.0 if sys.stdin.read() == "" else 0.0] * len(completions)

def needs(completions, answer, level):
    return [1.0 if c == a else 0.0 for c, a in zip(completions, answer)]

def tokens(completions, completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]

def chat(prompts, completions, **columns):
    return [float(c == [{"role": "assistant", "content": p[-1]["content"]}]) for p, c in zip(prompts, completions)]

def verbose(completions, text):
    return [float(len(t)) for t in text]

def environment(completions):
    return [float("SECRET" in os.environ) + 2 * float("NAMED" in os.environ) + 4 * float("PATH" in os.environ)]
"""
    + HANG
)

COUNT = 10
BAD = 6
COMPLETIONS = ["bad" if i == BAD else f"c{i}" for i in range(COUNT)]
PROMPTS = [f"p{i}" for i in range(COUNT)]


def score(file: str, *names: str, **options: Any) -> list[Reward]:
    with RewardPool([RewardSpec(f"{file}:{name}") for name in names], **options) as pool:
        return pool.score(PROMPTS, COMPLETIONS, [{}] * COUNT)


def test_rewards_are_weighted_and_summed(file: str) -> None:
    specs = [
        RewardSpec(f"{file}:length", 2.0),
        RewardSpec(f"{file}:half", -1.0, "bonus"),
        RewardSpec(f"{file}:some", 0.0),
    ]
    with RewardPool(specs) as pool:
        results = pool.score(PROMPTS, COMPLETIONS, [{}] * COUNT)
    assert results[0] == Reward(2 * 2 - 0.5, {"length": 2.0, "bonus": 0.5, "some": 2.0})
    assert results[BAD] == Reward(
        2 * 3 - 0.5, {"length": 3.0, "bonus": 0.5, "some": None}
    )  # of weight 0: only shown


def test_none_is_unscored_and_never_zero(file: str) -> None:
    """A None is left out of the sum, as in TRL; where nothing is left in it, the sample is
    unscored."""
    results = score(file, "some", "half")
    assert results[BAD] == Reward(0.5, {"some": None, "half": 0.5})
    assert {result.total for i, result in enumerate(results) if i != BAD} == {2.5}
    assert score(file, "some")[BAD] == Reward(None, {"some": None})
    failed = score(file, "raising", "half", on_error="skip")[
        BAD
    ]  # a failure is no None that was meant
    assert (failed.total, failed.by_function) == (None, {"raising": None, "half": 0.5})


DEADLINE = 0.8
FAILURES = {
    "raising": r"ValueError: no good \(my\.py, line 16\)",
    "hanging": r"no answer within 0\.8 s, killed \(last output: \[31mwaiting\)",
    "stuck": r"no answer within 0\.8 s, killed",
    "exiting": r"its process ended with exit code 3 \(last output: last words\)",
    "sys_exiting": r"SystemExit: enough \(my\.py, line 38\)",
    "aborting": r"its process was killed by SIGABRT",
    "nan": r"returned nan, expected a finite number or None",
    "shorter": r"returned 0 values for 1 completion",
}


@pytest.mark.usefixtures("only_hanging_takes_time")
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_traced_to_its_sample_and_skipped_or_stops(file: str, name: str) -> None:
    message = rf"reward function {file}:{name}, sample {BAD} \(prompt 'p{BAD}'\): {FAILURES[name]}"
    with RewardPool([RewardSpec(f"{file}:{name}")], deadline_s=DEADLINE, on_error="skip") as pool:
        results = pool.score(PROMPTS, COMPLETIONS, [{}] * COUNT)
        good = pool.score(["p"], ["fine"], [{}])
    assert [i for i, result in enumerate(results) if result.total is None] == [BAD]
    assert results[BAD].by_function == {name: None}
    assert re.fullmatch(message, results[BAD].error or "")
    assert {result.total for i, result in enumerate(results) if i != BAD} == {1.0}
    assert all(result.error is None for i, result in enumerate(results) if i != BAD)
    assert good == [Reward(1.0, {name: 1.0})]
    if name != "stuck":  # to the pool it is the same as hanging
        with pytest.raises(RunFailed, match=message):
            score(file, name, deadline_s=DEADLINE, on_error="stop")


def test_closing_the_pipes_is_a_failure_too(file: str) -> None:
    results = score(file, "closing", on_error="skip", deadline_s=5.0)
    assert [i for i, result in enumerate(results) if result.total is None] == [BAD]


def test_several_guilty_samples_are_all_found(file: str) -> None:
    completions = ["bad" if i in (3, 7, 8) else "c" for i in range(COUNT)]
    for name in ("raising", "exiting", "shorter"):
        with RewardPool([RewardSpec(f"{file}:{name}")], on_error="skip") as pool:
            results = pool.score(PROMPTS, completions, [{}] * COUNT)
        assert [i for i, result in enumerate(results) if result.total is None] == [3, 7, 8]
        with (
            pytest.raises(RunFailed, match="sample 3 "),
            RewardPool([RewardSpec(f"{file}:{name}")]) as pool,
        ):
            pool.score(PROMPTS, completions, [{}] * COUNT)


@pytest.mark.slow
def test_the_search_for_guilty_samples_is_bounded(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:exiting")], on_error="skip") as pool:
        results = pool.score(["p"] * 64, ["bad"] * 64, [{}] * 64)
        assert all(result.total is None for result in results)
        assert "ended with exit code 3" in (results[0].error or "")
        assert f"not examined: {MAX_DEATHS} processes" in (results[-1].error or "")
        assert pool.score(["p"], ["fine"], [{}])[0].total == 1.0


@pytest.mark.usefixtures("only_hanging_takes_time")
@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lonely", "returned 1 values for 10 completions"),
        ("together", r"ValueError: one at a time \(my\.py, line \d+\)"),
        (
            "slow",
            r"no answer within 1 s, killed; raise rewards\.deadline_s if the function is slow",
        ),
    ],
)
def test_what_fails_together_and_not_alone_is_scored_one_by_one(
    file: str, name: str, reason: str, on_error: str, capfd: Any
) -> None:
    """No reward is lost, and it is said."""
    results = score(file, name, on_error=on_error, deadline_s=1)
    assert {result.total for result in results} == {1.0}
    assert not any(result.error for result in results)
    said = (
        rf"reward function \S+my\.py:{name}: samples 0 to 9 were scored one by one, after it "
        r"failed on them together: "
    )
    assert re.search(said + reason + "\n", capfd.readouterr().err)


def test_samples_are_examined_by_all_workers_at_a_time(file: str) -> None:
    """A call alone waits until two workers are at work."""
    assert {r.total for r in score(file, "meeting", num_workers=2, deadline_s=20)} == {1.0}


MISSING = """
import os
def needs_key(completions, **columns):
    return [float(len(os.environ["JUDGE_API_KEY"]))] * len(completions)
def openai(completions, **columns):
    raise RuntimeError("api_key must be set by setting the JUDGE_API_KEY environment variable")
def refused(completions, **columns):
    raise RuntimeError("401 Client Error: Unauthorized for url: https://judge")
def path(completions, **columns):
    raise RuntimeError("nothing is wrong with the environment")
"""


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        (
            "needs_key",
            "secret",
            "; JUDGE_API_KEY is set here, and passed on where it is named in rewards.environment",
        ),
        (
            "openai",
            "secret",
            "; JUDGE_API_KEY is set here, and passed on where it is named in rewards.environment",
        ),
        ("refused", "secret", "without JUDGE_API_KEY: name what it needs in rewards.environment"),
        (
            "needs_key",
            None,
            "; JUDGE_API_KEY is not set: set it, and name it in rewards.environment",
        ),
        ("openai", None, "; JUDGE_API_KEY is not set: set it, and name it in rewards.environment"),
    ],
)
def test_a_variable_that_a_function_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, hint: str
) -> None:
    for variable in [
        each for each in os.environ if re.search("_(KEY|TOKEN|SECRET|PASSWORD)$", each)
    ]:
        monkeypatch.delenv(variable)
    if value is not None:
        monkeypatch.setenv("JUDGE_API_KEY", value)
    (tmp_path / "judge.py").write_text(MISSING)
    for text in (MISSING, MISSING + 'KEY = os.environ["JUDGE_API_KEY"]\n')[
        : 2 if name == "needs_key" else 1
    ]:
        (tmp_path / "judge.py").write_text(text)  # in the call, and at import
        pool = RewardPool([RewardSpec(f"{tmp_path}/judge.py:{name}")])
        with pool, pytest.raises(IsobitError) as caught:
            pool.score(["p"], ["c"], [{}])
        assert hint in str(caught.value)
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)
    if name == "needs_key" and value is not None:
        with RewardPool(
            [RewardSpec(f"{tmp_path}/judge.py:{name}")], environment=["JUDGE_API_KEY"]
        ) as pool:
            assert pool.score(["p"], ["c"], [{}])[0].total == 6


def test_negative_control_other_failures_have_no_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    (tmp_path / "judge.py").write_text(MISSING)
    with (
        RewardPool([RewardSpec(f"{tmp_path}/judge.py:path")]) as pool,
        pytest.raises(
            RunFailed, match=r"nothing is wrong with the environment \(judge\.py, line 10\)$"
        ),
    ):
        pool.score(["p"], ["c"], [{}])


def test_proxies_and_certificates_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["HTTPS_PROXY", "https_proxy", "NO_PROXY", "SSL_CERT_FILE"]
    for name in names:
        monkeypatch.setenv(name, "x")
    (tmp_path / "net.py").write_text(
        "import os\ndef found(completions, **k):\n    return [sum(n in os.environ for n in "
        f"{names})]\n"
    )
    with RewardPool([RewardSpec(f"{tmp_path}/net.py:found")]) as pool:
        assert pool.score(["p"], ["c"], [{}])[0].total == len(names)


def test_printing_does_not_disturb_and_goes_to_stderr(file: str, capfd: Any) -> None:
    assert {result.total for result in score(file, "printing")} == {1.0}
    out, err = capfd.readouterr()
    assert out == ""
    assert '{"values": [0.0]}' in err
    assert "error" in err


LOUD = """
import sys, time
print("imported")

def loud(completions):
    print("said \x1b[31m", completions[0])
    print("warned", file=sys.stderr)
    if "much" in completions:
        sys.stdout.write("x" * 3_000_000)
    if "bad" in completions:
        raise ValueError("no")
    return [1.0] * len(completions)
"""


def test_a_file_takes_what_is_printed(tmp_path: Path, capfd: Any) -> None:
    """Under the step, batch by batch, bounded; an error names it if the batch that failed printed
    anything."""
    (tmp_path / "loud.py").write_text(LOUD)
    log = tmp_path / "rewards.log"
    with RewardPool([RewardSpec(f"{tmp_path}/loud.py:loud")], num_workers=2) as pool:
        pool.start()
        pool.output.path = log
        state = {"global_step": 7, "max_steps": 9, "epoch": 0.5}
        assert pool.score(["p"], ["one"], [{}], None, state)[0].total == 1.0
        text = log.read_text()
        assert text.count("imported") == 2
        assert "--- after step 7\nimported\nsaid \x1b[31m one\nwarned\n" in text
        pool.score(["p"], ["two"], [{}], None, state)
        assert log.read_text().removeprefix(text) == "--- after step 7\nsaid \x1b[31m two\nwarned\n"
        with pytest.raises(
            RunFailed, match=rf"ValueError: no \(loud\.py, line 11\); what it printed: {log}$"
        ):
            pool.score(["p"], ["bad"], [{}], None, state)
        pool.score(["p"], ["much"], [{}], None, state)
        assert "--- after step 7\n(1,951,4" in log.read_text()
        for _ in range(20):
            pool.score(["p"], ["much"], [{}], None, state)
    sizes = [path.stat().st_size for path in (log, tmp_path / "rewards.log.1")]
    assert all(0 < size <= MAX_FILE_BYTES for size in sizes)
    assert capfd.readouterr() == ("", "")


def test_without_a_file_stderr_takes_it_and_no_terminal_obeys(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    with RewardPool([RewardSpec(f"{tmp_path}/loud.py:loud")]) as pool:
        pool.score(["p"], ["one"], [{}])
        assert capfd.readouterr() == ("", "imported\nsaid \\x1b[31m one\nwarned\n")
        with pytest.raises(RunFailed, match=r"line 11\)$"):
            pool.score(["p"], ["bad"], [{}])


def test_a_function_that_is_silent_writes_no_file(file: str, tmp_path: Path) -> None:
    with RewardPool([RewardSpec(f"{file}:nan")]) as pool:
        pool.output.path = tmp_path / "rewards.log"
        with pytest.raises(RunFailed, match=r"a finite number or None$"):
            pool.score(PROMPTS, COMPLETIONS, [{}] * COUNT)
    assert not (tmp_path / "rewards.log").exists()


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_workers(file: str) -> None:
    names = ("length", "raising", "nan", "some", "exiting")
    one, three = (score(file, *names, on_error="skip", chunk_size=3, num_workers=n) for n in (1, 3))
    assert one == three
    assert [i for i, result in enumerate(one) if result.total is None] == [BAD]
    messages = []
    for workers in (1, 3):
        with pytest.raises(RunFailed) as caught:
            score(file, *names, chunk_size=3, num_workers=workers)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_missing_columns_are_found_before_anything_is_scored(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:needs")]) as pool:
        with pytest.raises(
            IsobitError, match=r"my\.py:needs: the data has no column 'level'; did you mean 'levle'"
        ):
            pool.check_columns(["answer", "levle"])
        with pytest.raises(IsobitError, match="the data has no column 'answer'; the data has none"):
            pool.score(["p"], ["c"], [{}])
        rows = [{"answer": "a", "level": 1, "more": {}}, {"answer": "b", "level": 2, "more": {}}]
        assert [r.total for r in pool.score(["p", "p"], ["a", "a"], rows)] == [1.0, 0.0]
        assert pool.score([], [], []) == []


def test_token_ids_chats_and_large_columns_reach_the_function(file: str) -> None:
    with RewardPool([RewardSpec(f"{file}:tokens")]) as pool:
        assert [r.total for r in pool.score(["p", "p"], ["c", "c"], [{}, {}], [(1, 2), (3,)])] == [
            3.0,
            3.0,
        ]
    with RewardPool([RewardSpec(f"{file}:chat")]) as pool:
        prompts: list[Any] = [[{"role": "user", "content": text}] for text in ("a", "b")]
        assert [r.total for r in pool.score(prompts, ["a", "x"], [{}, {}])] == [1.0, 0.0]
    text = "é\ud800" * 300_000  # more than a pipe holds, and half of a surrogate pair
    with RewardPool([RewardSpec(f"{file}:verbose")]) as pool:
        assert pool.score(["p"], ["c"], [{"text": text}])[0].total == 600_000


def test_the_environment_is_small_and_can_be_widened(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("NAMED", "1")
    for environment, expected in (((), 4.0), (("NAMED", "ABSENT"), 6.0)):
        with RewardPool([RewardSpec(f"{file}:environment")], environment=environment) as pool:
            assert pool.score(["p"], ["c"], [{}])[0].total == expected


def test_functions_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path, file: str) -> None:
    def starting(*specs: RewardSpec) -> None:
        with RewardPool(specs) as pool:
            pool.start()

    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ndef score(completions)\n    return []\n")
    dying = tmp_path / "dying.py"
    dying.write_text("import os\nprint('so long')\nos._exit(5)\n")
    for specs, message in [
        (
            [RewardSpec(f"{file}:half"), RewardSpec(f"{tmp_path}/none.py:half")],
            r"no file .*none\.py",
        ),
        (
            [RewardSpec(f"{file}:half"), RewardSpec(f"{file}:half", 2.0)],
            "two reward functions are called 'half'",
        ),
        ([RewardSpec(f"{file}:half", float("inf"))], "its weight must be finite"),
        ([RewardSpec(f"{file}:haff")], r"has no function 'haff'; did you mean 'half'\?"),
        ([RewardSpec(f"{broken}:score")], r"SyntaxError: .* \(broken\.py, line 2\)"),
        (
            [RewardSpec(f"{dying}:score")],
            r"its process ended with exit code 5 \(last output: so long\) while it was",
        ),
        ([RewardSpec("nowhere.at_all:score")], "ModuleNotFoundError: No module named 'nowhere'"),
    ]:
        with pytest.raises(IsobitError, match=message) as caught:
            starting(*specs)
        assert not isinstance(caught.value, RunFailed)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_built_in_rewards_run_through_the_same_pool(name: str) -> None:
    task = load_task(TaskSettings(name, None, None, 70, options={"train_size": 10}))
    examples = list(task.held_out.examples)
    assert task.gold is not None
    gold = [example.columns[task.gold] for example in examples]
    columns = [example.columns for example in examples]
    prompts = [example.prompt for example in examples]
    with RewardPool(task.rewards) as pool:
        assert [r.total for r in pool.score(prompts, gold, columns)] == [1.0] * 70
        assert [r.total for r in pool.score(prompts, ["no"] * 70, columns)] == [0.0] * 70


def test_without_functions_any_rows_score_nothing() -> None:
    """Rows of several files may have different columns where no function is given them."""
    with RewardPool([]) as pool:
        assert pool.score(["p", "q"], ["c", "d"], [{"a": 1}, {"b": 2}]) == [Reward(0.0, {})] * 2


def test_a_pool_can_be_closed_twice_and_started_again(file: str) -> None:
    pool = RewardPool([RewardSpec(f"{file}:half")])
    pool.close()
    assert pool.score(["p"], ["c"], [{}])[0].total == 0.5
    pool.close()
    pool.close()
    assert pool.score(["p"], ["c"], [{}])[0].total == 0.5
    pool.close()
