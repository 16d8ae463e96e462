"""Write the repository's address into _config.yml, the one place where it stands.

Used where the book is published from a fork.

Usage: python tools/repository_url.py https://github.com/owner/name
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CONFIG = Path(__file__).resolve().parent.parent / "_config.yml"
ADDRESS = re.compile(r"^(repository:\n\s+url:) \S+", re.M)


def replace(text: str, url: str) -> str:
    """The configuration with another address.

    Raises:
        ValueError: The configuration has no address to replace, or this is none.
    """
    if not re.fullmatch(r"https://[^/\s]+/[^/\s]+/[^/\s]+", url):
        raise ValueError(f"an address is https://host/owner/name, got {url=}")
    if not ADDRESS.search(text):
        raise ValueError("_config.yml has no `repository: url:`")
    return ADDRESS.sub(rf"\1 {url}", text, count=1)


if __name__ == "__main__":
    config = CONFIG.read_text(encoding="utf-8")
    CONFIG.write_text(replace(config, sys.argv[1]), encoding="utf-8", newline="\n")
