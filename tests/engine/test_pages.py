import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.engine.pages import PagePool


def test_a_page_is_free_again_when_its_last_holder_lets_go() -> None:
    pool = PagePool(4, 16)
    first, second = pool.allocate(2), pool.allocate(1)
    pool.share(first)
    pool.integrity([first, first, second])
    pool.release(first)
    assert pool.num_free == 1
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.num_used, pool.peak_used) == (4, 0, 3)
    pool.integrity([])


def test_mistakes_are_caught() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.allocate(1)
    pool.release(pages[:1])
    with pytest.raises(AssertionError, match="more often than it was taken"):
        pool.release(pages[:1])
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        pool.share(pages[:1])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "has 1 references, but 0 holders"),
        ([[0], [0]], "1 references, but 2"),
        ([[0, 0]], "holds a page twice"),
    ],
)
def test_integrity_sees_leaks_and_uncounted_holders(tables: list[list[int]], message: str) -> None:
    pool = PagePool(3, 16)
    assert pool.allocate(1) == [0]
    pool.integrity([[0]])
    with pytest.raises(AssertionError, match=message):
        pool.integrity(tables)


def test_integrity_sees_a_broken_free_list() -> None:
    pool = PagePool(3, 16)
    pages = pool.allocate(1)
    pool._free.append(pages[0])
    with pytest.raises(AssertionError, match="both free and used"):
        pool.integrity([pages])
    pool = PagePool(3, 16)
    pool._free.pop()
    with pytest.raises(AssertionError, match="neither free nor used"):
        pool.integrity([])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=60), st.integers(1, 12))
def test_any_sequence_of_operations_keeps_the_counts_right(
    steps: list[tuple[int, int]], size: int
) -> None:
    pool = PagePool(size, 16)
    tables: list[list[int]] = []
    for kind, number in steps:
        if kind == 0 and number <= pool.num_free:
            tables.append(pool.allocate(number))
        elif kind == 1 and tables:
            tables.append(list(tables[number % len(tables)]))
            pool.share(tables[-1])
        elif kind == 2 and tables:
            pool.release(tables.pop(number % len(tables)))
        pool.integrity(tables)
    assert pool.num_used == len({page for table in tables for page in table})
