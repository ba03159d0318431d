"""What ranks send: the design's seconds, and the same bytes counted rank by rank."""

import pytest

from benchmarks.plan_jobs import MODELS, job
from isobit.plan import Job, traffic
from isobit.plan.memory import num_parameters, weights
from isobit.plan.seconds import exchange, micro_batch


@pytest.mark.parametrize(
    ("name", "ranks", "inside", "outside", "grouped"),
    [("Qwen3-8B", 8, 0.10, 0, 0), ("Qwen3-8B", 64, None, 0.64, 0.08), ("Qwen3-32B", 1024, None, 2.9, 0.36)],
)
def test_an_exchange_takes_the_designs_seconds(
    name: str, ranks: int, inside: float | None, outside: float, grouped: float
) -> None:
    """To 5 %: 300 GB/s in a machine, 45 GB/s between machines; sums of machines are an eighth of the bytes."""
    one, eight = (traffic.exchange(job(name, ranks=ranks, sum_group=group)) for group in (1, 8))
    if inside is not None:
        assert one.inside / 300e9 == pytest.approx(inside, rel=0.05)
    assert one.outside / 45e9 == pytest.approx(outside, rel=0.05)
    assert eight.outside / 45e9 == pytest.approx(grouped, rel=0.05)
    assert one.seconds == max(one.inside / 300e9, one.outside / 45e9)
    if ranks > 8:
        assert one.outside == pytest.approx(8 * eight.outside)
        assert one.seconds > 2 * eight.seconds  # the control: without groups it is longer


def _counted(given: Job, ranks: int) -> tuple[float, float]:
    """Bytes that rank 0 sends to its machine and to others, a message at a time: to each owner of a row that is in its
    group's place of that owner's machine."""
    group = given.sum_group
    piece, size = 4.0 * num_parameters(given.model) / ranks, min(ranks, given.per_node)
    # in its group: all rows that a member sums; to ranks of its own place in other groups: sums of their rows
    inside = (piece * ranks / group) * (group - 1) if group > 1 else 0.0
    others = [rank for rank in range(1, ranks) if rank // group > 0 and rank % group == 0]
    inside += sum(piece for rank in others if rank < size)
    return inside, sum(piece for rank in others if rank >= size)


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 64, 1024])
def test_bytes_are_those_of_the_messages(ranks: int, group: int) -> None:
    given = job("Qwen3-8B", ranks=ranks, sum_group=group)
    sent = traffic.exchange(given)
    assert (sent.inside, sent.outside) == pytest.approx(_counted(given, ranks))
    total = 4.0 * num_parameters(given.model) * (ranks - 1) / ranks
    if group == 1:
        assert sent.inside + sent.outside == pytest.approx(total)


def test_a_sync_sends_half_of_bf16s_bytes() -> None:
    given = job("Qwen3-30B-A3B", ranks=8)
    low, wide = (
        traffic.gather(given.under(flow, 8))
        for flow in (given.precision, job("Qwen3-30B-A3B", "precision=bf16").precision)
    )
    assert low.inside / wide.inside == pytest.approx(0.52, abs=0.02)
    assert low.inside == weights(given.model, given.precision).total * 7 / 8
    assert low.outside == 0
    far = traffic.gather(given.under(given.precision, 64))
    assert far.outside * 8 == pytest.approx(weights(given.model, given.precision).total * 7 / 8)


def test_what_the_backward_hides_is_not_exposed() -> None:
    even = [(0.1, 0.1)] * 10
    assert traffic.exposed(1.0, 100.0, even) == pytest.approx(0.1)  # the last bucket
    assert traffic.exposed(10.0, 0.0, even) == pytest.approx(10.0)
    assert traffic.exposed(10.0, 5.0, even) == pytest.approx(5.5)
    assert traffic.exposed(10.0, 5.0, [(1.0, 1.0)]) == pytest.approx(10.0)  # the control: one bucket hides nothing
    for config in MODELS.values():
        assert [sum(parts) for parts in zip(*traffic.buckets(config))] == pytest.approx([1, 1])
    given = job("Qwen3-8B", ranks=8)
    sent, shown = exchange(given)
    embedding = given.model.vocab_size * given.model.hidden_size / num_parameters(given.model)
    assert embedding * sent <= shown < 1.4 * embedding * sent  # complete last, with the first layer
    assert shown < 0.01 * micro_batch(given)
