"""A few of all combinations of parameters, in which each pair of values still meets.

Most faults that need a combination need two values (Kuhn, Wallace and Gallo, "Software Fault
Interactions and Implications for Software Testing", 2004), and with three parameters the pairs fit
into far fewer rows than the product.
"""

from collections.abc import Hashable, Sequence


def covering(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Places, in order, of rows that together hold every pair of values of two columns that `rows`
    hold.

    Greedy, and the first row wins where several hold as many new pairs. Then a row whose pairs
    others hold too goes, so that none can be left out."""
    pairs = [_pairs(row) for row in rows]
    left, chosen = set[Hashable]().union(*pairs), list[int]()
    while left:
        chosen.append(max(range(len(rows)), key=lambda place: (len(pairs[place] & left), -place)))
        left -= pairs[chosen[-1]]
    for place in list(chosen):
        others = set[Hashable]().union(*(pairs[other] for other in chosen if other != place))
        if pairs[place] <= others:
            chosen.remove(place)
    return sorted(chosen)


def _pairs(row: Sequence[Hashable]) -> set[Hashable]:
    return {(i, row[i], j, row[j]) for j in range(len(row)) for i in range(j)}
