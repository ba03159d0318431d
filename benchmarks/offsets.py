"""Whether a kernel's places in memory fit the integers that it computes them in, at any size.

The IR of a recorded launch is read with an interval for every integer: programs by the grid,
arguments as they are, numbers that are loaded up to a bound that the caller gives, ranges and loops
by their ends. Where a sum or a product of 32 bits may leave them, and what it gives reaches the
offset of a pointer, that is a wrong address. So a launch over tensors of any size is judged without
allocating one, on the meta device.

Left out: an integer that cannot be bounded, such as a sum over a tile, or what a loop carries and
increases: it is passed. Masks are not looked at, so a row that is masked off counts as one that is
read.
"""

import re
from dataclasses import dataclass, field

from benchmarks.cross_compile import triton_ir
from isobit.kernels.triton.launch import KernelLaunch

_DEFINED = re.compile(r"^(%[\w]+)(?::(\d+))? = \"?([\w.]+)\"?(.*)$")
_VALUE = re.compile(r"%[\w]+(?:#\d+)?")
_INTEGER = re.compile(r"(?:tensor<(?:\d+x)*)?i(\d+)>?$")
_SAME = {
    "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "arith.extsi",
    "arith.extui", "arith.index_cast", "arith.trunci", "ttg.convert_layout",
}  # fmt: skip
_WIDE = ("arith.addi", "arith.subi", "arith.muli", "arith.shli")


@dataclass(frozen=True)
class _Number:
    """What an integer may be, `low` to `high`; `wrapped`: the operation that left 32 bits on its
    way here, if any."""

    low: int
    high: int
    wrapped: str = ""


_Found = _Number | None  # None: not bounded


@dataclass
class _Region:
    """A loop, a condition, or another operation with a body: its results, and what they are until
    its end."""

    kind: str
    results: list[str]
    carried: list[str] = field(default_factory=list)
    before: list[_Found] = field(default_factory=list)
    yields: list[list[_Found]] = field(default_factory=list)


def overflows(launch: KernelLaunch, largest: int) -> list[str]:
    """The operations of 32 bits that leave them on the way to an address, in Triton's IR; `largest`
    bounds every integer that the kernel loads."""
    reader = _Reader(launch, largest)
    for line in triton_ir(launch).splitlines():
        reader.read(re.sub(r" loc\([^()]*(?:\([^()]*\))?\)", "", line).strip())
    return sorted(reader.reported)


class _Reader:
    def __init__(self, launch: KernelLaunch, largest: int) -> None:
        self._grid = (*launch.grid, 1, 1)[:3]
        self._arguments = dict(zip(launch.kernel.arg_names, launch.arguments))
        self._largest = largest
        self._known: dict[str, _Found] = {}
        self._regions: list[_Region] = []
        self.reported: set[str] = set()

    def read(self, line: str) -> None:
        """Take in the next line."""
        if line.startswith("tt.func"):
            for name in re.findall(r"%(\w+): i\d+", line):
                value = self._arguments.get(name)
                if isinstance(value, int):
                    self._known[f"%{name}"] = _Number(value, value)
        elif line.startswith("}"):
            self._end(line)
        elif line.startswith("scf.yield") and self._regions:
            self._regions[-1].yields.append(self._values(line))
        elif (found := _DEFINED.match(line)) is not None:
            name, count, operation, rest = found.groups()
            results = [name] if count is None else [f"{name}#{i}" for i in range(int(count))]
            self._define(results, operation, rest, line)
        elif line.endswith("{"):
            self._begin([], line)

    def _define(self, results: list[str], operation: str, rest: str, line: str) -> None:
        if line.endswith("{"):
            self._begin(results, f"{operation}{rest}")
            return
        value = self._value(operation, rest, line)
        for result in results:
            self._known[result] = value

    def _begin(self, results: list[str], line: str) -> None:
        region = _Region(line.split(" ")[0], results)
        if region.kind == "scf.for":
            head = re.match(r"scf\.for (%\w+) = (%[\w#]+) to (%[\w#]+) step", line)
            assert head is not None, line
            low, high = self._known.get(head[2]), self._known.get(head[3])
            self._known[head[1]] = low and high and _Number(low.low, max(low.low, high.high - 1))
            pairs = re.findall(r"(%\w+) = (%[\w#]+)", line.partition("iter_args(")[2])
            region.carried = [name for name, _ in pairs]
            region.before = [self._known.get(given) for _, given in pairs]
            # what a loop changes is not followed from one step to the next
            for name, given in zip(region.carried, region.before):
                self._known[name] = given if given is not None and given.wrapped else None
        self._regions.append(region)

    def _end(self, line: str) -> None:
        if not self._regions or line.startswith("} else"):
            return
        region = self._regions.pop()
        ways = region.yields + ([region.before] if region.before else [])
        for index, result in enumerate(region.results):
            self._known[result] = _either([way[index] for way in ways if index < len(way)])

    def _values(self, text: str) -> list[_Found]:
        return [self._known.get(name) for name in _VALUE.findall(text.partition(" : ")[0])]

    def _value(self, operation: str, rest: str, line: str) -> _Found:
        given = self._values(rest)
        if operation == "tt.addptr":
            if given[1] is not None and given[1].wrapped:
                self.reported.add(given[1].wrapped)
            return None
        kind = _INTEGER.search(line)
        if kind is None:
            return None
        if operation == "arith.constant":
            number = re.search(r"(?:dense<)?(-?\d+|true|false)>? :", rest)
            return None if number is None or not number[1].lstrip("-").isdigit() else _exactly(
                int(number[1])
            )  # fmt: skip
        if operation in ("tt.get_program_id", "tt.get_num_programs"):
            size = self._grid["xyz".index(rest.split()[0])]
            return _Number(0, size - 1) if operation == "tt.get_program_id" else _exactly(size)
        if operation == "tt.make_range":
            ends = {name: int(end) for name, end in re.findall(r"(\w+) = (\d+) : i32", rest)}
            return _Number(ends["start"], ends["end"] - 1)
        if operation == "tt.load":
            return _Number(0, self._largest)
        return _computed(operation, given, int(kind[1]), line)


def _exactly(value: int) -> _Number:
    return _Number(value, value)


def _either(given: list[_Found]) -> _Found:
    known = [value for value in given if value is not None]
    wrapped = next((value.wrapped for value in known if value.wrapped), "")
    if len(known) < len(given) or not known:
        return _Number(0, 0, wrapped) if wrapped else None
    return _Number(min(v.low for v in known), max(v.high for v in known), wrapped)


def _computed(operation: str, given: list[_Found], bits: int, line: str) -> _Found:
    wrapped = next((value.wrapped for value in given if value is not None and value.wrapped), "")
    if operation == "arith.cmpi":
        return _Number(0, 1)
    if operation == "arith.select":
        return _either(given[1:])
    known = [value for value in given if value is not None]
    if len(known) < len(given):
        return _Number(0, 0, wrapped) if wrapped else None
    found = _interval(operation, known)
    if found is None:
        return _Number(0, 0, wrapped) if wrapped else None
    low, high = found
    if bits == 32 and operation in _WIDE and (low < -(2**31) or high >= 2**31):
        return _Number(-(2**31), 2**31 - 1, wrapped or line)
    return _Number(low, high, wrapped)


def _interval(operation: str, given: list[_Number]) -> tuple[int, int] | None:
    """Of the result, before it is cut to its bits; None where nothing is said."""
    if operation in _SAME:
        return given[0].low, given[0].high
    if len(given) != 2:
        return None
    a, b = given
    if operation == "arith.addi":
        return a.low + b.low, a.high + b.high
    if operation == "arith.subi":
        return a.low - b.high, a.high - b.low
    if operation in ("arith.muli", "arith.shli"):
        ends = (b.low, b.high)
        if operation == "arith.shli":
            ends = (1 << max(b.low, 0), 1 << min(max(b.high, 0), 64))
        products = [x * y for x in (a.low, a.high) for y in ends]
        return min(products), max(products)
    if operation in ("arith.divsi", "arith.divui"):  # by what is positive, or it were wrong anyway
        ends = (max(b.low, 1), max(b.high, 1))
        quotients = [int(x / y) if x < 0 else x // y for x in (a.low, a.high) for y in ends]
        return min(quotients), max(quotients)
    if operation in ("arith.remsi", "arith.remui"):
        most = max(b.high, 1) - 1
        return max(min(a.low, 0), -most), min(max(a.high, 0), most)
    if operation in ("arith.minsi", "arith.maxsi"):
        pick = min if operation == "arith.minsi" else max
        return pick(a.low, b.low), pick(a.high, b.high)
    return None
