"""The documentation site: built strictly and without network, complete, closed in itself, readable
from disk."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import isobit
from tests.browser import Open
from tests.documents import PAGES, ROOT

pytestmark = pytest.mark.slow
NOWHERE = "http://127.0.0.1:9"  # a proxy that answers nobody
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}


class Page(HTMLParser):
    """What a built page loads, where its links lead, and which anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in LOADED and values.get(LOADED[tag]):
            self.loads.append(values[LOADED[tag]])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next", "edit"):
            self.loads.append(values["href"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason='needs pip install "isobit[docs]"')
    folder = tmp_path_factory.mktemp("site")
    variables = {
        **os.environ,
        "http_proxy": NOWHERE,
        "https_proxy": NOWHERE,
        "NO_MKDOCS_2_WARNING": "1",
    }
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert page.loads
        outside = [
            address for address in page.loads if urlsplit(address).scheme not in ("", "data")
        ]
        assert not outside + [address for address in page.loads if address.startswith("//")], path
        missing = [
            a for a in page.loads if not urlsplit(a).scheme and not _target(site, path, a).is_file()
        ]
        assert not missing, path
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert "url(http" not in text, style
        assert "@import" not in text, style


def test_all_links_resolve(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                continue
            target = _target(site, path, link)
            assert target.is_file(), f"{path.name}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name}: {link}"


def test_every_page_is_reachable(site: Path, pages: dict[Path, Page]) -> None:
    seen, waiting = set[Path](), [site / "index.html"]
    while waiting:
        path = waiting.pop()
        if path in seen or path not in pages:
            continue
        seen.add(path)
        waiting += [
            _target(site, path, link) for link in pages[path].links if not urlsplit(link).scheme
        ]
    assert set(pages) - seen <= {site / "404.html"}
    assert len(seen) == len(PAGES)


def test_every_public_name_is_documented(site: Path, pages: dict[Path, Page]) -> None:
    anchors = pages[site / "api.html"].anchors
    for name in isobit.__all__:
        value = getattr(isobit, name)
        home = ".".join(value.__module__.split(".")[:2])
        assert {f"{home}.{name}", f"{value.__module__}.{name}"} & anchors, name
    text = (site / "api.html").read_text(encoding="utf-8")
    for name, field in (("Sampling", "seed"), ("Completion", "logprobs")):
        heading = text.index(f' id="isobit.engine.types.{name}"')
        assert f"<code>{field}</code>" in text[heading : text.index("<h3", heading + 1)]


def _target(site: Path, page: Path, link: str) -> Path:
    """The file that a relative link on a page leads to."""
    path = unquote(urlsplit(link).path)
    above = site if path.startswith("/") else page.parent  # 404.html is served from any depth
    target = Path(os.path.normpath(above / path.lstrip("/"))) if path else page
    return target / "index.html" if target.is_dir() else target


@pytest.mark.parametrize(
    ("words", "name", "key"),
    [
        ("learning rate", "config", "optimizer.learning_rate"),
        ("batch size", "config", "prompts_per_step"),
        ("temperature", "config", "sampling.temperature"),
        ("KL", "config", "algorithm.kl_coefficient"),
        ("kv_pages", "config", "engine.kv_pages"),
        ("zero_spread_fraction", "metrics", "groups/zero_spread_fraction"),
    ],
)
def test_a_search_finds_the_key_first(
    site: Path, opened: Open, words: str, name: str, key: str
) -> None:
    """The first result is the page of keys, or metrics, with this one below it; Enter leads to its
    row."""
    with opened(site / "index.html") as seen:
        seen.page.evaluate("document.querySelector('input.md-search__input').focus()")
        seen.page.locator("input.md-search__input").press_sequentially(words)
        found = seen.page.locator(".md-search-result__item").first.locator("a[href*='#']").first
        found.wait_for(timeout=60_000)
        address = urlsplit(found.get_attribute("href") or "")
        assert (Path(address.path).name, address.fragment) == (f"{name}.html", key)
        seen.page.keyboard.press("Enter")
        seen.page.wait_for_url(f"**/{name}.html*#{key}")
        assert seen.page.locator(f"[id='{key}'] td code").first.inner_text() == key


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_cut(site: Path, opened: Open, pages: dict[Path, Page], width: int) -> None:
    """No page scrolls sideways; code fits into its box, and what a program printed scrolls inside
    it."""
    cut = """() => [...document.querySelectorAll(".md-content pre > code")]
        .filter((code) => code.scrollWidth > code.clientWidth + 1)
        .filter((code) => !code.closest(".language-text") || getComputedStyle(code).overflowX != "auto")
        .map((code) => code.innerText)"""
    for path in pages:
        with opened(path, width=width) as seen:
            assert not seen.scrolls_sideways(), path.name
            assert seen.page.evaluate(cut) == [], path.name
    with opened(
        site / "commands.html", width=width
    ) as seen:  # the control: code that is not wrapped
        seen.page.add_style_tag(
            content=".md-typeset pre > code { white-space: pre !important; font-size: 2em }"
        )
        assert seen.page.evaluate(cut)


def test_it_is_read_and_searched_from_disk(site: Path, opened: Open) -> None:
    """In headless Chromium from file://: search finds a page, the palette turns, nothing is asked
    from elsewhere."""
    with opened(site / "index.html") as seen:
        body = seen.page.locator("body")
        before = body.get_attribute("data-md-color-scheme")
        seen.page.locator("form[data-md-component=palette] label:not([hidden])").first.click()
        assert {before, body.get_attribute("data-md-color-scheme")} == {"default", "slate"}
        seen.page.evaluate("document.querySelector('input.md-search__input').focus()")
        seen.page.locator("input.md-search__input").press_sequentially("token_mult_prob_error")
        # not all links and then this one: results of the words so far come and go meanwhile
        found = seen.page.locator(".md-search-result__item a[href*='metrics.html']")
        found.first.wait_for(timeout=60_000)
    assert not [line for line in seen.said if line.startswith(("error", "request: http"))]
