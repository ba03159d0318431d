"""What `isobit eval` prints and writes of one result, or of two side by side. Imports no torch, so
that saved results appear at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobit.errors import IsobitError, printable
from isobit.evaluation.comparison import adapters_table, compare, comparison_json, comparison_table
from isobit.evaluation.result import Result, read_result, write_result
from isobit.evaluation.summary import summarize, summary_json, summary_table
from isobit.run import durable

_SAVED = ".json"


def is_saved(path: Path) -> bool:
    """Return whether a side is a result that was written before."""
    return path.suffix == _SAVED


def show(result: Result, against: Result | None, out: Path | None) -> None:
    """Write it to `out`, and print it. Raises IsobitError for results that cannot be compared."""
    if against is None:
        text = f"{result.model}\n\n{summary_table(result)}"
    else:
        text = comparison_table(result, against)
    try:  # each also where the other fails
        if out is not None:
            write_result(out, _content(result, against))
    finally:
        print(printable(text))


def show_adapters(base: Result, adapters: Mapping[str, Result], out: Path | None) -> None:
    """Print a model alone and with each of several adapters; write each result to a separate file:
    the model's to `out`, an adapter's to the same folder, with the adapter's name after a
    hyphen."""
    try:
        if out is not None:
            write_result(out, _content(base))
            for name, result in adapters.items():
                write_result(out.with_name(f"{out.stem}-{name}{out.suffix}"), _content(result))
    finally:
        print(printable(adapters_table(base, adapters)))


def show_saved(first: Path, second: Path | None, out: Path | None, changed: bool) -> None:
    """Print saved results as `show` does. `changed`: whether the command line asks for something of
    them that only an evaluation can give, which raises IsobitError."""
    if changed:
        raise IsobitError(
            "saved results are not evaluated again: leave every option but --against and --out out"
        )
    show(read_result(first), None if second is None else read_result(second), out)


def check_out(out: Path | None) -> None:
    """Raise IsobitError if a result could not be written there, before it is computed."""
    if out is not None:
        durable.check_new_file(out, "--out")


def _content(result: Result, against: Result | None = None) -> dict[str, Any]:
    content = {**result.to_json(), "summary": summary_json(summarize(result))}
    if against is not None:
        content |= {
            "against": _content(against),
            "comparison": comparison_json(compare(result, against)),
        }
    return content
