"""Run a case: roll out, compare with the learner's packed log-probabilities and with another
schedule; all bits."""

from dataclasses import dataclass, field, replace
from random import Random

import torch

from isobit.engine.engine import Engine
from isobit.engine.types import Completion, EngineSize, Request
from isobit.model import Model, Tokenizer
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from isobit.training.rollouts.sources import sample_of
from tests.models import ALPHABET

from .cases import Case, Schedule
from .weights import fill

Key = tuple[int, int]
"""(prompt id, sample index)"""


@dataclass
class Found:
    """What differed, in words, and how many log-probabilities were compared with the learner's."""

    differences: list[str] = field(default_factory=list)
    tokens: int = 0


def check(case: Case, backend: str) -> Found:
    """Everything that a case compares. Whatever is raised is a failure too, and the caller's."""
    model = Model.init(case.config, Tokenizer.characters(ALPHABET), case.flow, 0, backend)
    fill(model.named_parameters(), case.weights, case.seed)
    model.sync()
    if case.adapter is not None:
        model = _adapted(model, case)
    found = Found()
    for version in range(case.updates + 1):
        when = f" after {version} update" if version else ""
        both = [
            _roll_out(model, case, schedule, not i) for i, schedule in enumerate(case.schedules)
        ]
        rolled, last = [first for first, _ in both], [last for _, last in both]
        _compare_schedules(rolled[0], rolled[1], f"under the second schedule{when}", found)
        if case.turns:
            turns = f" in {1 + len(case.turns)} turns{when}"
            _compare_schedules(last[0], last[1], f"under the second schedule{turns}", found)
            learner = _learner(model, case, list(last[version % 2].values()), update=False)
            _compare_learner(last[version % 2], learner, turns, found)
        others = _arrive(model, case, case.schedules[version % 2], rolled[0])
        _compare_schedules(rolled[0], others, f"beside other requests{when}", found)
        learner = _learner(
            model, case, list(rolled[version % 2].values()), update=version < case.updates
        )
        _compare_learner(rolled[version % 2], learner, when, found)
    return found


@torch.no_grad()
def _adapted(base: Model, case: Case) -> Model:
    """With the case's adapter, as after updates: B is not 0."""
    assert case.adapter is not None
    model, generator = base.adapted(case.adapter), torch.Generator().manual_seed(case.seed)
    for parameter in model.parameters():
        scale = 1 / parameter.shape[1] ** 0.5
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    model.sync()
    return model


def _size(schedule: Schedule) -> EngineSize:
    return EngineSize(
        schedule.kv_pages,
        schedule.page_size,
        schedule.max_batch_tokens,
        schedule.max_sequences,
        prefix_cache=schedule.prefix_cache,
        num_speculative_tokens=schedule.num_speculative_tokens,
    )


def _roll_out(
    model: Model, case: Case, schedule: Schedule, calibrate: bool
) -> tuple[dict[Key, Completion], dict[Key, Completion]]:
    """The completions of the case, and what they have become after its turns."""
    torch.set_num_threads(schedule.threads)
    engine = Engine(model, _size(schedule), record_routes=model.config.experts is not None)
    prompts = [list(case.prompts[i]) for i in schedule.order]
    if calibrate:
        engine.calibrate(prompts)
    groups = engine.generate(prompts, case.sampling, [case.prompt_ids[i] for i in schedule.order])
    engine.integrity()
    first = {(c.prompt_id, c.sample_index): c for group in groups for c in group}
    last = dict(first)
    for given in case.turns:
        _take_turn(engine, case, given, last)
    return first, last


def _take_turn(
    engine: Engine, case: Case, given: tuple[int, ...], last: dict[Key, Completion]
) -> None:
    """Give every completion these tokens, and let it go on for a few, where there is room under
    both schedules; a greedy one may have ended."""
    sampling = replace(case.sampling, n=1, max_new_tokens=3)
    room = min(schedule.kv_pages * schedule.page_size for schedule in case.schedules)
    for completion in last.values():
        tokens = len(completion.prompt_token_ids) + len(completion.token_ids) + len(given)
        if tokens + sampling.max_new_tokens < min(room, case.config.max_positions):
            engine.continue_from(completion, given, sampling)
    while engine.num_open:
        for _, completion in engine.step():
            last[completion.prompt_id, completion.sample_index] = completion
        engine.integrity()


def _arrive(
    model: Model, case: Case, schedule: Schedule, known: dict[Key, Completion]
) -> dict[Key, Completion]:
    """The case's requests one by one, each submitted between two steps, and beside them others that
    are cancelled or have other settings. A sample whose first tokens are given goes on as it did:
    here as the completion."""
    rng, n = Random(case.seed), case.sampling.n
    size = _size(schedule)
    engine = Engine(
        model,
        size,
        record_routes=model.config.experts is not None,
        kv_pages=2 * schedule.kv_pages,
        max_batch_tokens=size.max_batch_tokens + 40,
        max_sequences=size.max_sequences + 4,
    )
    other = replace(case.sampling, n=1, temperature=1.1, top_k=4, top_p=0.9, min_p=0.0, stop=())
    coming, doomed, results = list(schedule.order), list[Request](), dict[Key, Completion]()
    wanted: set[Request] = set()
    while coming or engine.num_open:
        while coming and rng.random() < 0.5:
            index = coming.pop(0)
            prompt = list(case.prompts[index])
            prompt_id = case.prompt_ids[index]
            sample = rng.randrange(n)
            wanted.add(engine.submit(prompt, case.sampling, prompt_id))
            doomed.append(engine.submit(prompt, other, prompt_id + 1 & 2**32 - 1))
            tokens = known[prompt_id, sample].token_ids
            if len(tokens) > 1 and not case.sampling.stop:
                given = rng.randrange(1, len(tokens))
                rest = replace(
                    case.sampling, n=1, max_new_tokens=case.sampling.max_new_tokens - given
                )
                wanted.add(engine.submit([*prompt, *tokens[:given]], rest, prompt_id, sample))
        for request, completion in engine.step():
            if request in wanted:
                _keep(completion, len(known[completion.prompt_id, 0].prompt_token_ids), results)
        if doomed and rng.random() < 0.3:
            engine.cancel(doomed.pop(0))
        engine.integrity()
    return results


def _keep(completion: Completion, length: int, results: dict[Key, Completion]) -> None:
    """A completion, or what differs from it in one of its ends, whose prompt is longer than
    `length`."""
    key = (completion.prompt_id, completion.sample_index)
    given = len(completion.prompt_token_ids) - length
    if given == 0:
        whole, end = completion, results.get(key)
    else:
        whole, end = results.get(key), completion
    if whole is None or end is None:
        results[key] = completion
        return
    given = len(end.prompt_token_ids) - length
    same = (end.token_ids, end.logprobs, end.routes) == (
        whole.token_ids[given:],
        whole.logprobs[given:],
        whole.routes,
    )
    results[key] = (
        whole if same else replace(whole, finish_reason="another when its first tokens are given")
    )


def _learner(
    model: Model, case: Case, completions: list[Completion], update: bool
) -> dict[Key, torch.Tensor]:
    """The learner's log-probabilities by key; with `update`, the masters then take a step, and the
    model is synced."""
    learning = case.learning
    torch.set_num_threads(learning.threads)
    samples = [sample_of(c) for c in completions]
    rng = Random(learning.seed)
    rng.shuffle(samples)
    cuts = sorted(rng.choices(range(1, len(samples) + 1), k=learning.parts - 1))
    parts = [samples[a:b] for a, b in zip([0, *cuts], [*cuts, len(samples)]) if b > a]
    temperature = 1.0 if case.sampling.greedy else case.sampling.temperature
    results: dict[Key, torch.Tensor] = {}
    for part in parts:
        packed = pack(part, learning.share_prompts and model.config.linear is None)
        logprobs, entropy = forward(
            model, packed, temperature, case.sampling.filtering, recompute=learning.recompute
        )
        if update:
            (logprobs.sum() + 0.1 * entropy.sum()).backward()
        rows = logprobs.detach().split(
            [sum(s.completion_mask or [1] * len(s.completion_ids)) for s in part]
        )
        results |= {(s.prompt_index, s.sample_index): row for s, row in zip(part, rows)}
    if update:
        _step(model)
    return results


@torch.no_grad()
def _step(model: Model) -> None:
    """Every master moves by a hundredth of its size, along its gradient."""
    for parameter in model.parameters():
        if parameter.grad is not None and (norm := float(parameter.grad.norm())) > 0:
            parameter.add_(parameter.grad, alpha=0.01 * float(parameter.norm()) / norm)
            parameter.grad = None
    model.sync()


def _compare_schedules(
    left: dict[Key, Completion], right: dict[Key, Completion], where: str, found: Found
) -> None:
    other = [key for key, c in left.items() if c.token_ids != right[key].token_ids]
    if other:
        found.differences.append(
            f"{len(other)} of {len(left)} completions have other tokens {where}, the first: "
            f"prompt id {other[0][0]}, sample {other[0][1]}"
        )
        return
    differing = [key for key, c in left.items() if c != right[key]]
    if differing:
        names = sorted(
            {
                n
                for key in differing
                for n, v in vars(left[key]).items()
                if v != getattr(right[key], n)
            }
        )
        found.differences.append(
            f"{', '.join(names)} of {len(differing)} of {len(left)} completions differ {where}"
        )


def _compare_learner(
    rolled: dict[Key, Completion], learner: dict[Key, torch.Tensor], when: str, found: Found
) -> None:
    differing, first = 0, ""
    for key, completion in rolled.items():
        sampled = [p for p, own in zip(completion.logprobs, completion.sampled) if own]
        recorded = torch.tensor(sampled, dtype=torch.float32)
        assert recorded.shape == learner[key].shape
        unlike = (
            (recorded.view(torch.int32) != learner[key].view(torch.int32))
            .nonzero()
            .flatten()
            .tolist()
        )
        if unlike and not differing:
            i = unlike[0]
            first = (
                f"prompt id {key[0]}, sample {key[1]}, token {i}: {recorded[i]:.9g} and "
                f"{learner[key][i]:.9g}"
            )
        differing += len(unlike)
        found.tokens += len(recorded)
    if differing:
        total = sum(len(c.token_ids) for c in rolled.values())
        found.differences.append(
            f"{differing} of {total} log-probabilities are not the learner's{when}, first {first}"
        )
