"""Links to the book's own repository: where they should lead, by the config and git."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import yaml

ROOT = Path(__file__).resolve().parent.parent
WITH_PATH = {"blob", "blame", "edit", "raw", "tree"}
WITHOUT = {"actions", "commit", "discussions", "issues", "pull", "pulls", "releases"}


@functools.cache
def config() -> dict:
    """The book's configuration, the one place where owner and branch stand."""
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))


def git(*arguments: str) -> list[str]:
    """The lines that git prints, or none where this is no checkout."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    return done.stdout.decode("utf-8").splitlines()


@functools.cache
def tracked() -> frozenset[str]:
    """The files in git, and their folders."""
    files = git("-c", "core.quotePath=off", "ls-files")
    folders = {parent.as_posix() for file in files for parent in Path(file).parents}
    return frozenset(files) | folders


def branches() -> set[str]:
    """The branches that git knows, here or at a remote."""
    refs = git("for-each-ref", "--format=%(refname)", "refs/heads", "refs/remotes")
    return {re.sub(r"^refs/(heads|remotes/[^/]+)/", "", ref) for ref in refs}


def is_own(link: str) -> bool:
    """Whether a link names the repository, under whatever owner, host or launcher."""
    name = config()["repository"]["url"].rsplit("/", 1)[-1]
    parts = urlsplit(link)
    return bool(parts.netloc) and name in parts.path.split("/")


def complaint(link: str) -> str | None:
    """What is wrong with a link to the repository; None if nothing is."""
    place, launcher = config()["repository"], config()["launch_buttons"]
    url, anchor = urldefrag(link.partition("?")[0])
    owner_and_name = urlsplit(place["url"]).path
    homes = (place["url"], f"{launcher['colab_url']}/github{owner_and_name}")
    home = next((h for h in homes if url == h or url.startswith(f"{h}/")), None)
    if home is None:
        return f"{link}: not the repository of _config.yml"
    kind, _, rest = url.removeprefix(home).strip("/").partition("/")
    if not kind or kind in WITHOUT:
        return None
    branch, _, path = unquote(rest).partition("/")
    if kind not in WITH_PATH or branch != place["branch"]:
        return f"{link}: neither a page of the host nor branch {place['branch']}"
    if path not in tracked():
        return f"{link}: {path} is not in git"
    n_lines = max(map(int, re.findall(r"L(\d+)", anchor)), default=0)
    if n_lines and n_lines > (ROOT / path).read_bytes().count(b"\n"):
        return f"{link}: {path} has no such line"
    return None


def complaints(links: Iterable[str]) -> list[str]:
    """What is wrong with the links to the repository."""
    own = sorted(link for link in set(links) if is_own(link))
    return [wrong for link in own if (wrong := complaint(link))]
