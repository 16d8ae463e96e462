"""The built book, a server for it on localhost, and a real browser."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import shutil
import sys
import threading
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build" / "html"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
).split()

sys.path.insert(0, str(ROOT / "site"))
# Not by its name, which is also that of a package for wheels.
spec = importlib.util.spec_from_file_location("build_book", ROOT / "site" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def pages() -> list[str]:
    """The path of each built page, under the book's root."""
    paths = (path.relative_to(HTML).as_posix() for path in HTML.rglob("*.html"))
    return sorted(path for path in paths if not path.startswith("_static/"))


def pytest_generate_tests(metafunc) -> None:
    """One test for each built page, or one that fails where there is none."""
    if "page_path" in metafunc.fixturenames:
        metafunc.parametrize("page_path", pages() or ["index.html"])


@pytest.fixture(scope="session", autouse=True)
def book() -> Path:
    """The folder of the built book, which must be that of the present sources."""
    stamp = HTML.parent / "stamp"
    if not (HTML / "index.html").is_file() or not stamp.is_file():
        pytest.exit("there is no built book: run `make book` first", returncode=1)
    if stamp.read_text(encoding="utf-8") != build.digest():
        pytest.exit("the built book is stale: run `make book` first", returncode=1)
    return HTML


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *args) -> None:
        """Nothing."""


@pytest.fixture(scope="session")
def address(book):
    """The book's address on localhost."""
    handler = functools.partial(Quiet, directory=str(book))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser():
    """Chromium; a missing one is a failure, for the pages would go unseen."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.exit("there is no Chromium: .ci/run installs it", returncode=1)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()
