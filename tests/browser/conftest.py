"""The built book, a server for it on localhost, and a real browser.

BOOK=folder tests the book in another folder, whatever it was built from.
"""

from __future__ import annotations

import functools
import gzip
import http.server
import importlib.util
import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
HTML = Path(os.environ.get("BOOK", ROOT / "_build" / "html")).resolve()
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
).split()
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
CHECKS = ROOT / "tests" / "browser" / "checks.js"
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 420, "height": 900}
# Console errors that are known and harmless: why, then the pattern. None at present.
ALLOWED: dict[str, str] = {}
# A page that shows text at once: how late it is says how busy this machine is.
SENTENCE = "data:text/html,<p>One sentence alone."
AT_ONE_SIGHT = 100  # milliseconds until it is seen on an idle machine
FORGET = """
if (location.protocol == "http:") { localStorage.clear(); sessionStorage.clear(); }
"""
AT_ONCE = "*, *::before, *::after { transition: none !important; animation: none; }"

sys.path.insert(0, str(ROOT / "site"))
# Not by its name, which is also that of a package for wheels.
spec = importlib.util.spec_from_file_location("build_book", ROOT / "site" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


@functools.cache
def pages() -> list[str]:
    """The path of each built page, under the book's root, the largest first."""
    sizes = {path: path.stat().st_size for path in HTML.rglob("*.html")}
    paths = sorted(sizes, key=lambda path: (-sizes[path], path))
    names = (path.relative_to(HTML).as_posix() for path in paths)
    return [name for name in names if not name.startswith("_static/")]


def on(wanted: Callable[[str], bool]) -> Callable:
    """Restrict a test to the pages that are wanted."""

    def mark(test: Callable) -> Callable:
        test.wanted = wanted
        return test

    return mark


def is_chapter(path: str) -> bool:
    """Whether a page is made from a notebook."""
    return path.startswith("chapters/")


def pytest_generate_tests(metafunc) -> None:
    """One test for each page that it is for, or one that fails where there is none."""
    if "page_path" in metafunc.fixturenames:
        wanted = getattr(metafunc.function, "wanted", lambda path: True)
        paths = [path for path in pages() if wanted(path)] or ["none.html"]
        metafunc.parametrize("page_path", paths, scope="session")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give all tests of a page to one process, one after the other, for its loading.

    Heavy pages come first, and tests that need none of them fill the gaps at the end.
    The groups of pytest-xdist 3.8 itself are lost under pytest 9.2.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByPage(LoadScopeScheduling):
        """Work in units of a page, which is the parameter of its tests."""

        def _split_scope(self, nodeid: str) -> str:
            page = nodeid.rpartition("[")[2].removesuffix("]")
            return page if page.endswith(".html") else nodeid

    return ByPage(config, log)


@pytest.fixture(scope="session", autouse=True)
def book() -> Path:
    """The folder of the built book, which must be that of the present sources."""
    stamp = HTML.parent / "stamp"
    if not (HTML / "index.html").is_file():
        pytest.exit("there is no built book: run `make book` first", returncode=1)
    if "BOOK" not in os.environ and (
        not stamp.is_file() or stamp.read_text(encoding="utf-8") != build.digest()
    ):
        pytest.exit("the built book is stale: run `make book` first", returncode=1)
    return HTML


@functools.cache
def squeezed(path: Path) -> bytes:
    """A file as hosts of static pages send it."""
    return gzip.compress(path.read_bytes(), compresslevel=6)


class Host(http.server.SimpleHTTPRequestHandler):
    """Serves files as hosts of static pages do: text is compressed on its way."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        """Nothing."""

    def send_head(self):
        """Send the headers and give the body."""
        path = Path(self.translate_path(self.path))
        if path.suffix not in {".html", ".css", ".js", ".svg"} or not path.is_file():
            return super().send_head()
        body = squeezed(path)
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)


@pytest.fixture(scope="session")
def address(book):
    """The book's address on localhost."""
    handler = functools.partial(Host, directory=str(book))
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
        chromium = playwright.chromium.launch(
            executable_path=path, args=[*FLAGS, OFFLINE]
        )
        yield chromium
        chromium.close()


class Watched:
    """A page in a context of its own that remembers what went wrong on it."""

    def __init__(self, browser, address: str, **how) -> None:
        self.address, self.wrong, self.n_bytes, self.size = address, [], 0, DESK
        self.scripts = how.get("java_script_enabled", True)
        self.context = browser.new_context(viewport=DESK, **how)
        self.context.add_init_script(path=CHECKS)
        self.context.set_default_timeout(90_000)  # of one that shares its cores
        self.page = self.context.new_page()
        self.page.on("console", self.on_console)
        self.page.on("pageerror", lambda error: self.note(f"script: {error}"))
        self.page.on("response", self.on_response)
        self.page.on("request", self.on_request)
        self.wire = self.context.new_cdp_session(self.page)
        self.wire.send("Network.enable")
        self.wire.on("Network.loadingFinished", self.on_finished)

    def note(self, what: str) -> None:
        """Keep what went wrong, unless it is allowed."""
        if not any(re.search(pattern, what) for pattern in ALLOWED.values()):
            self.wrong.append(what)

    def on_request(self, request) -> None:
        """Note what is asked for elsewhere; the browser is offline and gets nothing."""
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.note(f"request to another host: {request.url}")

    def on_console(self, message) -> None:
        """Note an error in the console."""
        if message.type == "error":
            self.note(f"console: {message.text}")

    def on_response(self, response) -> None:
        """Note what is missing."""
        if response.status >= 400:
            self.note(f"{response.status} for {response.url}")

    def on_finished(self, event: dict) -> None:
        """Count what was transferred."""
        self.n_bytes += event["encodedDataLength"]

    def open(self, path: str):
        """Load a page and wait until its scripts have drawn what they draw."""
        self.page.goto(self.address + path)
        if self.scripts and self.page.locator(".math").count():
            self.page.wait_for_selector("mjx-container")
            self.page.evaluate(
                "MathJax.startup.promise.then(() => document.fonts.ready)"
            )
        return self.page

    def leave(self) -> float:
        """Go where nothing of the last page is left; how many times too slow that is.

        The next page finds an empty cache and a window that is wide and light.
        """
        self.page.goto(SENTENCE)
        self.page.emulate_media(color_scheme="light", media="screen")
        self.page.set_viewport_size(DESK)
        self.wire.send("Network.clearBrowserCache")
        self.wrong, self.n_bytes, self.size = [], 0, DESK
        return max(1, self.page.evaluate("checks.firstText()") / AT_ONE_SIGHT)

    def show(self, size: dict, scheme: str = "light", media: str = "screen") -> None:
        """Change the window, the theme and the medium."""
        if size != self.size:
            self.page.set_viewport_size(size)
        self.page.emulate_media(color_scheme=scheme, media=media)
        self.page.wait_for_selector(f"html[data-theme={scheme}]", state="attached")
        self.size = size


@pytest.fixture
def watched(browser, address):
    """An empty page."""
    page = Watched(browser, address)
    yield page
    page.context.close()


@pytest.fixture(scope="session")
def window(browser, address):
    """A window for one page after the other: a new one costs as much as a page."""
    window = Watched(browser, address)
    window.context.add_init_script(FORGET)
    yield window
    window.context.close()


@pytest.fixture(scope="session")
def opened(window, page_path, tmp_path_factory, request):
    """A page of the book, loaded once for all its tests, in whatever process."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if hasattr(request.config, "workerinput") else own
    (shared / page_path.replace("/", " ")).touch(exist_ok=False)
    window.busy = window.leave()
    window.open(page_path)
    window.page.add_style_tag(content=AT_ONCE)
    yield window
    assert window.wrong == [], page_path
