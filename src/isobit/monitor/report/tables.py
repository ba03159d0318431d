"""Tables of cells, the first row their heads: as aligned plain text, and as HTML. The first column
is text, the others are numbers."""

from collections.abc import Sequence

from isobit.monitor.report.document import escaped

Cells = Sequence[Sequence[str]]


def text_table(cells: Cells, rule: bool = False) -> str:
    """Return the lines of a table, its columns two spaces apart; with `rule` a line under the
    heads."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))
        for row in cells
    ]
    head, *body = (line.rstrip() for line in lines)
    return "\n".join([head, *(["-" * len(lines[0])] if rule else []), *body])


def html_table(cells: Cells) -> str:
    """Return a table that scrolls sideways where it is too wide."""
    lines = [_line(row, "th" if i == 0 else "td") for i, row in enumerate(cells)]
    return f"<div class='wide'><table>{''.join(lines)}</table></div>"


def _line(row: Sequence[str], tag: str) -> str:
    first, *cells = (escaped(cell) for cell in row)
    numbers = "".join(f"<{tag} class='number'>{cell}</{tag}>" for cell in cells)
    return f"<tr><{tag}>{first}</{tag}>{numbers}</tr>"
