"""What mkdocs does besides: every key of docs/config.md, and every metric of docs/metrics.md, gets an anchor, and an
entry in the search.

The tables of keys and metrics are marked, so that a narrow window shows the cells of a row one
below the other. A page with wide output has no list of contents beside it.
Without this a search for *learning rate* would lead to a long table. The words by which people look
for a key, such as *batch size* for `prompts_per_step`, are those of docs/quick-reference.md.
"""

import ast
import html
import re
from pathlib import Path
from typing import Any

QUICK = re.compile(r"^\| ([^|`]+) \| \[`([\w.]+)`\][^|]*\|[^|]*\| (.+) \|$", re.M)
"""A row of docs/quick-reference.md: what it is called, the key, and what it does."""
ROW = re.compile(r"<tr>\n<td><code>([\w./*]+)</code></td>\n(.+?)</tr>", re.S)
BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.M | re.S)
CODE_COLUMNS = 90
CELL = re.compile(r"<t[dh][^>]*>.*?</t[dh]>", re.S)
NAME = re.compile(r"(?<=<code>)[^<]{12,}(?=</code>)")
LONG_NAME = 48
"""A longer name may break in a wide window too."""
FOUND = ("config.md", "metrics.md")
"""Pages of which each row is found."""
STACKED = (*FOUND, "quick-reference.md")
BREAKING = ("methods.md", "from-trl.md", "from-verl.md", "from-nemo-rl.md")
"""Pages whose tables are full of long names: these may break in a wide window too."""
PUBLIC = re.compile(r"^::: (isobit[\w.]*)\.(\w+)\n(?: +.*\n)*", re.M)
"""An entry of docs/api.md."""
SOURCE = Path(__file__).parent.parent / "src"
QUICK_BOOST = 4.0
"""A key that many people set comes before others that match equally well."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leave the room of the contents to the text, where a block of output is wider than code may be; and put a table of
    its fields behind each public dataclass."""
    output = "".join(text for language, text in BLOCK.findall(markdown) if language in ("", "text"))
    if any(len(line) > CODE_COLUMNS for line in output.splitlines()):
        page.meta["hide"] = ["toc"]
    return PUBLIC.sub(lambda entry: entry[0] + _fields(*entry.groups()), markdown)


def _fields(module: str, name: str) -> str:
    """Return a table of the fields of a dataclass, as its source declares them; nothing for another object."""
    file = SOURCE.joinpath(*module.split(".")).with_suffix(".py")
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    classes = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    node = next(
        (node for node in classes if "dataclass" in "".join(map(ast.unparse, node.decorator_list))),
        None,
    )
    fields = (
        [] if node is None else [field for field in node.body if isinstance(field, ast.AnnAssign)]
    )
    rows = []
    for field in fields:
        kind, text = field.annotation, ""
        if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) in (
            "Annotated",
            "NotAnOption",
        ):
            parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
            kind, *notes = parts
            text = "".join(note.value for note in notes if isinstance(note, ast.Constant))
        default = "required" if field.value is None else f"`{ast.unparse(field.value)}`"
        shown = ast.unparse(kind).replace("|", "\\|")
        rows.append(f"| `{ast.unparse(field.target)}` | `{shown}` | {default} | {text} |")
    head = "\n| field | type | default | |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n" if rows else ""


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Add an id to each row of a key or a metric; of a key that is there twice (`steps`) the second gets `steps-2`."""
    if page.file.src_uri in STACKED:
        content = content.replace("<table>", "<table data-keys>")
    if page.file.src_uri in BREAKING:
        content = content.replace("<table>", "<table data-breaks>")
    if page.file.src_uri not in FOUND:
        return content
    seen: dict[str, int] = {}

    def with_anchor(row: re.Match[str]) -> str:
        seen[row[1]] = seen.get(row[1], 0) + 1
        if "<td>section</td>" in row[0] and (heading := _heading(row[1], seen[row[1]], content)):
            link = f'<td><a href="#{heading}">section</a></td>'
            return row[0].replace("<td>section</td>", link)
        anchor = row[1] if seen[row[1]] == 1 else f"{row[1]}-{seen[row[1]]}"
        page.present_anchor_ids.add(anchor)
        return row[0].replace("<tr>", f'<tr id="{anchor}">', 1)

    content = content.replace("<td>required</td>", "<td data-required>required</td>")
    return ROW.sub(with_anchor, content)


def _heading(key: str, occurrence: int, content: str) -> str | None:
    """The anchor of a section's heading; the second `model` has another one than the first, the second `task` not."""
    first = key.replace(".", "")
    anchors = (f"{first}_{occurrence - 1}", first)
    return next((anchor for anchor in anchors if f' id="{anchor}"' in content), None)


def on_page_context(context: Any, page: Any, config: Any, **_: Any) -> None:
    """Add the entries, behind the page's own, which the search plugin has made by now."""
    if page.file.src_uri not in FOUND:
        return
    quick = (Path(config["docs_dir"]) / "quick-reference.md").read_text(encoding="utf-8")
    words = {key: (name, text.replace("`", "")) for name, key, text in QUICK.findall(quick)}
    entries = config.plugins["material/search"].search_index.entries
    row = re.compile(ROW.pattern.replace("<tr>", '<tr id="([^"]+)">', 1), re.S)
    for anchor, key, cells in row.findall(page.content):
        text = " ".join(html.unescape(re.sub("<[^>]+>", " ", cells)).split())
        entry = {"location": f"{page.url}#{anchor}", "title": key, "text": text}
        if anchor in words:
            name, meaning = words[anchor]
            entry |= {"title": f"{name}: {key}", "text": f"{meaning} {text}", "boost": QUICK_BOOST}
        entries.append(entry)


def on_post_page(output: str, **_: Any) -> str:
    """Let long names in tables break after a sign between their parts; site.css says where they may."""

    def broken(cell: re.Match[str]) -> str:
        return NAME.sub(name_broken, cell[0])

    def name_broken(name: re.Match[str]) -> str:
        place = '<wbr class="wide">' if len(name[0]) > LONG_NAME else "<wbr>"
        return re.sub(r"([/._=]|(?<!isobit)\[)(?=[A-Za-z{])", rf"\1{place}", name[0])

    return CELL.sub(broken, output)
