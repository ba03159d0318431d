"""Headless Chromium for the tests of pages: a page of a file on disk, and everything that it should
not do."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
    "--disable-dev-shm-usage",
)


@dataclass
class Opened:
    """A page, and what it said on the console, which errors it had, and what it asked the network
    for."""

    page: Any
    said: list[str] = field(default_factory=list)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name, exact=True).click()

    def scrolls_sideways(self) -> bool:
        return self.page.evaluate(
            "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )

    def dismiss(self, dialog: Any) -> None:
        """Note a dialog, and close it."""
        self.said.append(f"dialog: {dialog.message}")
        dialog.dismiss()


def require_browser() -> None:
    """Skip the test where there is no browser; fail it where ISOBIT_REQUIRE_BROWSER says that there
    has to be one."""
    try:
        import playwright.sync_api  # noqa: F401
    except ModuleNotFoundError:
        missing = "playwright is not installed"
    else:
        missing = "" if CHROMIUM.is_file() else f"{CHROMIUM} is not here"
    if missing and os.environ.get("ISOBIT_REQUIRE_BROWSER"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


Open = Callable[..., AbstractContextManager[Opened]]


@pytest.fixture(scope="module")
def opened() -> Iterator[Open]:
    """`opened(path, width=1200, scheme="light", script=True)`: the page of an HTML file in a fresh
    context of the module's browser. `scheme`: light or dark; `script`: whether scripts run."""
    require_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))

        @contextmanager
        def open_page(
            path: Path, width: int = 1200, scheme: str = "light", script: bool = True
        ) -> Iterator[Opened]:
            context = browser.new_context(
                viewport={"width": width, "height": 800},
                color_scheme=scheme,
                java_script_enabled=script,
            )
            page = context.new_page()
            page.set_default_timeout(20_000)
            found = Opened(page)
            page.on("console", lambda message: found.said.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: found.said.append(f"error: {error}"))
            page.on("dialog", found.dismiss)
            own = path.as_uri()
            page.on(
                "request",
                lambda r: (
                    found.said.append(f"request: {r.url}") if r.url.split("#")[0] != own else None
                ),
            )
            page.goto(own)
            try:
                yield found
            finally:
                context.close()

        yield open_page
        browser.close()
