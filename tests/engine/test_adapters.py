"""Requests of several adapters and of the base alone in one batch: each has the bits that it has
alone."""

import shutil
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from isobit.engine.engine import Engine
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.adapters.multi_lora import MultiLora, Rows
from isobit.model.adapters.targets import NewAdapter
from tests.models import level, require, slow_where, tiny_model, trained_adapters

PROMPTS = ["1+1=", "23*4=", "1+1=", "9-", "567+89=567+89=", "1+1="]
NAMES = ["a", "b", None, "a", "b", "b"]
ADAPTERS = {"a": NewAdapter(4, 8), "b": NewAdapter(3, 2, ["q_proj", "down_proj"])}
SAMPLING = Sampling(n=2, max_new_tokens=6, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and the two adapters after an update, as their folders."""
    return _saved(tmp_path_factory.mktemp("adapters"), "qwen3")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a mixture of experts, which have adapters too."""
    return _saved(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def _saved(where: Path, family: str) -> Path:
    tiny_model("bf16", family, scale=4).save(where / "base")
    trained_adapters(where, ADAPTERS)
    return where


def served(
    folder: Path, precision: str = "fp8", backend: str = "native", consistency: str | None = None
) -> Model:
    base = Model.load(folder / "base", precision, backend, consistency or level(backend))
    return base.serving({name: folder / name for name in ADAPTERS})


def alone(folder: Path, name: str | None, precision: str, backend: str, consistency: str) -> Engine:
    given = None if name is None else folder / name
    return Engine(
        Model.load(folder / "base", precision, backend, consistency, adapter=given), page_size=4
    )


def drawn(groups: list[list[Completion]]) -> list[list[tuple[list[int], list[float]]]]:
    return [[(c.token_ids, c.logprobs) for c in group] for group in groups]


@pytest.mark.parametrize(
    ("backend", "consistency", "precision"),
    slow_where(
        [
            (*by, precision)
            for by in (("native", "bitwise"), ("native", "exact"), ("reference", "exact"))
            for precision in ("fp8", "bf16", "nvfp4")
        ],
        lambda backend, consistency, precision: (
            backend == "reference" or (consistency == "exact" and precision != "fp8")
        ),
    ),
)
def test_each_request_has_the_bits_that_it_has_alone(
    folder: Path, backend: str, consistency: str, precision: str
) -> None:
    _each_is_as_it_is_alone(folder, backend, consistency, precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "consistency", "precision"),
    slow_where(
        [
            ("native", "bitwise", "fp8"),
            ("native", "bitwise", "nvfp4"),
            ("native", "exact", "fp8"),
            ("reference", "exact", "fp8"),
        ],
        lambda backend, consistency, precision: backend == "reference" or precision == "nvfp4",
    ),
)
def test_and_so_it_has_where_experts_have_adapters(
    experts: Path, backend: str, consistency: str, precision: str
) -> None:
    _each_is_as_it_is_alone(experts, backend, consistency, precision)


def _each_is_as_it_is_alone(folder: Path, backend: str, consistency: str, precision: str) -> None:
    require(backend)
    wanted: list[list[Completion]] = []
    for index, (prompt, name) in enumerate(zip(PROMPTS, NAMES)):
        wanted += alone(folder, name, precision, backend, consistency).generate(
            [prompt], SAMPLING, [index]
        )
    model = served(folder, precision, backend, consistency)
    for sizes in ({}, {"max_batch_tokens": 3, "max_sequences": 3}):  # prompts in chunks
        engine = Engine(model, page_size=4, **sizes)
        found = engine.generate(PROMPTS, SAMPLING, range(len(PROMPTS)), adapters=NAMES)
        assert drawn(found) == drawn(wanted)
        assert [group[0].adapter for group in found] == NAMES
        again = engine.generate(
            PROMPTS, SAMPLING, range(len(PROMPTS)), adapters=NAMES
        )  # from the prefix cache
        assert drawn(again) == drawn(wanted)
        assert engine.stats.cached_tokens > 0


def test_a_mixed_batch_is_multiplied_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that leaves the bits: C++ then finds rows and adapters in a table. The control may not
    multiply rows together; which are whose is found once for all weights that have the same
    adapters."""
    model = served(folder)
    ops = model.transformer.ops["rollout"]
    found, splits, once = list[object](), list[int](), list[int]()
    counts, split = Counter[str](), Rows._split

    def counted(product: Any) -> Any:
        def call(self: Any, *given: Any, **more: Any) -> Any:
            counts["products"] += 1
            return product(self, *given, **more)

        return call

    def noted(self: Any, known: Any) -> Any:
        counts["splits"] += 1
        return split(self, known)

    for allowed in (True, False):
        with monkeypatch.context() as patch:
            counts.clear()
            for name in ("product", "adapted_product"):
                patch.setattr(type(ops), name, counted(getattr(type(ops), name)))
            patch.setattr(Rows, "_split", noted)
            if not allowed:
                patch.setattr(type(ops), "rounds_last", lambda self, a, b: False)
            engine = Engine(model, page_size=4, prefix_cache=False, cuda_graphs=False)
            found.append(drawn(engine.generate(PROMPTS, SAMPLING, range(6), adapters=NAMES)))
            once.append(counts["products"])
            splits.append(counts["splits"])
    assert found[0] == found[1]
    assert once[0] < 0.8 * once[1]
    assert splits[0] == 0 < splits[1] < once[0] / 2


def test_neither_preemption_nor_pages_of_ones_own_change_a_bit(folder: Path) -> None:
    model = served(folder)
    wanted = drawn(Engine(model, page_size=4).generate(PROMPTS, SAMPLING, adapters=NAMES))
    small = Engine(model, page_size=4, kv_pages=7)
    assert drawn(small.generate(PROMPTS, SAMPLING, adapters=NAMES)) == wanted
    assert small.stats.preemptions > 0
    small.integrity()
    assert (
        drawn(
            Engine(model, page_size=4, prefix_cache=False).generate(
                PROMPTS, SAMPLING, adapters=NAMES
            )
        )
        == wanted
    )


@pytest.mark.parametrize("model", ["folder", "experts"])
def test_the_learner_computes_the_bits_of_a_mixed_batch(
    model: str, request: pytest.FixtureRequest
) -> None:
    """Of each adapter and of the base, by a model that has it alone. The control: by the other
    adapter's."""
    folder: Path = request.getfixturevalue(model)
    groups = Engine(served(folder), page_size=4).generate(PROMPTS, SAMPLING, adapters=NAMES)
    models = {
        name: alone(folder, name, "fp8", "native", "bitwise").model for name in (*ADAPTERS, None)
    }
    other = {"a": "b", "b": None, None: "a"}

    def of(name: str | None, completion: Completion) -> list[float]:
        rows = (
            models[name]
            .logprobs([[*completion.prompt_token_ids, *completion.token_ids]])[0]
            .tolist()
        )
        return rows[len(completion.prompt_token_ids) - 1 :]

    for group, name in zip(groups, NAMES):
        for completion in group:
            assert of(name, completion) == completion.logprobs
            assert of(other[name], completion) != completion.logprobs


def test_rows_of_another_adapter_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    model = served(folder)
    wanted = drawn(Engine(model).generate(PROMPTS, SAMPLING, adapters=NAMES))
    number = MultiLora.number
    monkeypatch.setattr(
        MultiLora, "number", lambda self, name: {0: 1, 1: 0, -1: -1}[number(self, name)]
    )
    found = drawn(Engine(model).generate(PROMPTS, SAMPLING, adapters=NAMES))
    assert [ours == theirs for ours, theirs in zip(found, wanted)] == [
        name is None for name in NAMES
    ]


def test_pages_of_another_adapter_are_not_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control looks pages up by their tokens alone."""
    model, prompt = served(folder), ["567+89=567+89="]
    wanted = drawn(Engine(model, page_size=4).generate(prompt, SAMPLING, adapters=["b"]))

    def after_another(engine: Engine) -> list[list[tuple[list[int], list[float]]]]:
        engine.generate(prompt, SAMPLING, adapters=["a"])
        return drawn(engine.generate(prompt, SAMPLING, adapters=["b"]))

    assert after_another(Engine(model, page_size=4)) == wanted
    monkeypatch.setattr("isobit.engine.scheduler.Scheduler._root", lambda self, sequence: self.root)
    assert after_another(Engine(model, page_size=4)) != wanted


def test_a_completion_goes_on_with_its_adapter(folder: Path) -> None:
    model = served(folder)
    engine = Engine(model)
    first = engine.generate(["1+1="], SAMPLING, adapters=["b"])[0][0]
    request = engine.continue_from(first, [3, 4], SAMPLING)
    assert request.adapter == "b"
    while not (done := engine.step()):
        pass
    assert done[0][1].adapter == "b"


def test_what_cannot_be_served_is_said(folder: Path, tmp_path: Path) -> None:
    model = served(folder)
    with pytest.raises(
        IsobitError, match="adapter: 'c' is not served by this model; it serves a, b"
    ):
        Engine(model).submit("1+1=", adapter="c")
    with pytest.raises(IsobitError, match=r"it serves none; Model\.serving opens it"):
        Engine(tiny_model()).submit("1+1=", adapter="a")
    with pytest.raises(IsobitError, match="adapters: expected one for each of 2 prompts, got 1"):
        Engine(model).generate(["1", "2"], adapters=["a"])
    with pytest.raises(IsobitError, match="calibrates its KV cache"):
        served(folder, "fp8-rollout-kv")
    tensorwise = {"preset": "fp8", "activation_granularity": "tensor"}
    with pytest.raises(
        IsobitError,
        match=r"scale is shared by the rows of a batch .*of several adapters; serve them one",
    ):
        Model.load(folder / "base", tensorwise, "native", "fast").serving({"a": folder / "a"})
    with pytest.raises(IsobitError, match="serving: expected folders of adapters by name"):
        model.serving(["a"])  # type: ignore[arg-type]
    with pytest.raises(IsobitError, match="nothing"):
        model.serving({"a": tmp_path / "nothing"})


def test_folders_that_belong_elsewhere_are_refused(folder: Path, tmp_path: Path) -> None:
    """The controls: the model's copy, and an adapter whose model is gone."""
    for seed, name in ((0, "copy"), (1, "other")):
        tiny_model("bf16", seed=seed, scale=4).save(tmp_path / name)
    with pytest.raises(IsobitError, match="copy: a whole model, merged or never adapted"):
        served(folder).serving({"merged": tmp_path / "copy"})
    other = Model.load(tmp_path / "other", "fp8", "native")
    with pytest.raises(
        IsobitError, match=r"a: of the model .*base, whose weights are not those of .*other"
    ):
        other.serving({"a": folder / "a"})
    Model.load(tmp_path / "copy", "fp8", "native").serving({"a": folder / "a"})
    shutil.copytree(folder / "a", tmp_path / "a")
    config = (tmp_path / "a" / "adapter_config.json").read_text()
    (tmp_path / "a" / "adapter_config.json").write_text(
        config.replace(str(folder / "base"), str(tmp_path / "gone"))
    )
    other.serving({"a": tmp_path / "a"})
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(
        IsobitError, match="a: its chat template is not the model's; serve it alone"
    ):
        other.serving({"a": tmp_path / "a"})


def test_adapters_come_and_go_while_requests_are_open(folder: Path) -> None:
    """The control: by the other adapter's factors the same requests have other bits."""
    wanted = drawn(Engine(served(folder), page_size=4).generate(PROMPTS, SAMPLING, adapters=NAMES))
    model = Model.load(folder / "base", "fp8", "native", level("native")).serving({})
    engine = Engine(model, page_size=4)
    long = Sampling(n=2, max_new_tokens=40, seed=1, ignore_eos=True)
    requests = {engine.submit("9-", long): -1}
    found: dict[int, list[Completion]] = {}

    def step() -> None:
        for request, completion in engine.step():
            found.setdefault(requests[request], []).append(completion)
        engine.integrity()

    for name in ("a", "b", None):
        step()
        if name is not None:
            model.add_adapter(name, folder / name)
        for index, (prompt, of) in enumerate(zip(PROMPTS, NAMES)):
            if of == name:
                requests[engine.submit(prompt, SAMPLING, index, adapter=of)] = index
    while engine.num_open > 1:
        step()
    model.remove_adapter("a")
    groups = [sorted(found[i], key=lambda c: c.sample_index) for i in range(len(PROMPTS))]
    assert drawn(groups) == wanted
    while engine.num_open:
        step()
    alone = Engine(Model.load(folder / "base", "fp8", "native", level("native")), page_size=4)
    assert drawn([sorted(found[-1], key=lambda c: c.sample_index)]) == drawn(
        alone.generate(["9-"], long)
    )
    model.add_adapter("c", folder / "b")
    other = drawn(
        engine.generate(PROMPTS, SAMPLING, adapters=["c" if n == "a" else n for n in NAMES])
    )
    assert [ours == theirs for ours, theirs in zip(other, wanted)] == [
        name != "a" for name in NAMES
    ]


def test_a_name_is_given_once_also_by_two_threads_at_a_time() -> None:
    """While the factors of the first are made. The control: another name; and a name is free again
    where its factors cannot be made."""
    serving, said = MultiLora(), list[str]()
    serving.of("w")

    def entered(name: str) -> None:
        try:
            serving.enter(name, lambda weight: None)
        except IsobitError as error:
            said.append(f"{name}: {error}")

    def meanwhile(weight: str) -> None:
        for name in ("a", "b"):
            thread = Thread(target=entered, args=(name,))
            thread.start()
            thread.join()

    def broken(weight: str) -> None:
        raise IsobitError("cannot be read")

    serving.enter("a", meanwhile)
    with pytest.raises(IsobitError, match="cannot be read"):
        serving.enter("c", broken)
    serving.enter("c", lambda weight: None)
    assert len(said) == 1
    assert said[0].startswith("a: adapter: the name 'a' was given to another one before")
    assert sorted(serving.names) == ["a", "b", "c"]
    assert len(set(serving.names.values())) == 3


def test_an_adapter_that_left_is_said_and_its_name_is_used_up(folder: Path) -> None:
    model = served(folder)
    engine = Engine(model)
    request = engine.submit("1+1=", SAMPLING, adapter="a")
    engine.step()
    model.remove_adapter("a")
    with pytest.raises(
        IsobitError, match="adapter: 'a' is not served any more; cancel its requests"
    ):
        engine.step()
    engine.cancel(request)
    engine.integrity()
    with pytest.raises(IsobitError, match="the name 'a' was given to another one before"):
        model.add_adapter("a", folder / "a")
    with pytest.raises(IsobitError, match="this model serves no adapters"):
        tiny_model().add_adapter("a", folder / "a")
    with pytest.raises(IsobitError, match="'a' is not served any more"):
        model.remove_adapter("a")
