"""The author documentation in ``primitives/docs``: one Markdown page per primitive."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import yaml

import primitives
from verifier.verdict import HarnessError

FOLDER = Path(primitives.__file__).parent / "docs"
_FOR_TESTS = re.compile(r"^<!-- expects: .*? -->\n?", re.M | re.S)  # what a page's example must compute; not for readers


@functools.lru_cache(maxsize=1)
def _index() -> dict[str, tuple[str, Path]]:
    """Name -> (family, page)."""
    found = {}
    for path in sorted(FOLDER.glob("*.md")):
        head = yaml.safe_load(path.read_text().split("---")[1])
        for name in head["names"]:
            found[name] = (head["family"], path)
    return found


def pages() -> dict[str, list[str]]:
    """Names by family."""
    out: dict[str, list[str]] = {}
    for name, (family, _) in _index().items():
        out.setdefault(family, []).append(name)
    return out


def page(name: str) -> str:
    """Text of the page that documents ``name``, without its front matter.

    Raises:
        HarnessError: no such primitive.
    """
    if name not in _index():
        raise HarnessError(f"no page for {name!r}; there are: {', '.join(sorted(_index()))}")
    text = _index()[name][1].read_text().split("---", 2)[2]
    return _FOR_TESTS.sub("", text).strip()
