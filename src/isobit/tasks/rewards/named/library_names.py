"""Names of the standard library that tests use without importing them: `Counter(f(x))`,
`isclose(f(x), y)`. Such a name means the library's object, even if the program defines the name
too; otherwise a program with a `class Counter` that is equal to everything would pass.

A name means the program's object if a test asks for it: a test that has no other name of the
program (`assert isclose(1, 1)`), or, for a function, a test that passes the function's value to
the program (`assert near(sqrt(4), 2)`). Left out: names that are tasks as often as helpers (`gcd`,
`median`, `product`, `compress`), which are the program's.
"""

import ast
from collections.abc import Iterator, Sequence, Set

_DATA = {
    "collections": "ChainMap Counter OrderedDict UserDict UserList UserString defaultdict deque "
    "namedtuple",
    "datetime": "datetime timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "math": "inf nan pi tau",
    "string": "ascii_letters ascii_lowercase ascii_uppercase hexdigits",
    "types": "SimpleNamespace",
    "unittest": "TestCase",
}
_FUNCTIONS = {
    "copy": "deepcopy",
    "functools": "cmp_to_key lru_cache partial reduce wraps",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement dropwhile "
    "filterfalse groupby islice pairwise permutations starmap takewhile tee zip_longest",
    "math": "acos asin atan atan2 cbrt ceil copysign cos cosh exp expm1 fabs floor fmod frexp fsum "
    "hypot isclose isfinite isinf isnan isqrt ldexp log10 log1p log2 modf nextafter radians "
    "degrees sin sinh sqrt tan tanh trunc ulp",
    "numpy": "allclose array_equal",
    "operator": "attrgetter itemgetter methodcaller",
    "random": "getrandbits randint randrange",
    "statistics": "fmean pstdev pvariance stdev variance",
}
_HOMES = {
    name: module
    for table in (_DATA, _FUNCTIONS)
    for module, names in table.items()
    for name in names.split()
}
_WHERE_DATA_IS = {name for names in _DATA.values() for name in names.split()}


def library_names(free: Set[str], tests: Sequence[str]) -> dict[str, str]:
    """Return those of the `free` names that are the library's, each with its `module:name`.
    `tests`: the sources that score."""
    other_names = free - _HOMES.keys()
    known = {*free} & _HOMES.keys()
    for test in tests:
        uses = list(_places(ast.parse(test), ()))
        alone = not other_names & {name for name, _ in uses}
        for name, callers in uses:
            if alone or (name not in _WHERE_DATA_IS and other_names & {*callers}):
                known.discard(name)
    return {name: f"{_HOMES[name]}:{name}" for name in sorted(known)} if other_names else {}


def _places(node: ast.AST, callers: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each name in a tree, with the names of the functions in whose arguments it stands."""
    if isinstance(node, ast.Name):
        yield node.id, callers
    if not isinstance(node, ast.Call):
        for child in ast.iter_child_nodes(node):
            yield from _places(child, callers)
        return
    yield from _places(node.func, callers)
    inside = (*callers, node.func.id) if isinstance(node.func, ast.Name) else callers
    for argument in (*node.args, *node.keywords):
        yield from _places(argument, inside)
