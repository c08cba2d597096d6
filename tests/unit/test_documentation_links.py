"""Links and paths in README, CONTRIBUTING and docs/ lead to files that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "quiver"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
HISTORY = ROOT / "CHANGELOG.md"
"""Names files as they were called in each version: only its links are checked."""

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_PATH = re.compile(r"`(?P<path>(?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|toml|txt))?)`")
_FILE_NAME = re.compile(r"^`(?:[\w-]+/)*(?P<name>[\w-]+\.py)`$")
_ROOTS = ("src", "tests", "benches", "examples", "docs")
"""Folders of the repository; a path that begins with another folder belongs to the package if it ends with `.py`."""


def find_broken(page: Path, text: str) -> list[str]:
    """Return a sentence for every link or path in a page's prose that leads nowhere."""
    prose = _FENCE.sub("", text)
    found = [*_broken_links(page, prose)]
    if page != HISTORY:
        found += _broken_paths(prose)
    return found


def _broken_links(page: Path, prose: str) -> Iterator[str]:
    for match in _LINK.finditer(prose):
        target = match["target"].split("#")[0]
        if not target or "://" in target:
            continue
        if not (page.parent / target).exists():
            yield f"link to {target}"
        name = _FILE_NAME.match(match["text"])
        if name is not None and target.endswith(".py") and Path(target).name != name["name"]:
            yield f"link called {name['name']} leads to {target}"


def _broken_paths(prose: str) -> Iterator[str]:
    for match in _PATH.finditer(prose):
        path = match["path"]
        folder = path.split("/")[0]
        if folder in _ROOTS:
            exists = (ROOT / path).exists() or (SOURCE / path).exists()
        elif (SOURCE / folder).is_dir() and path.endswith(".py"):
            exists = (SOURCE / path).exists()
        else:
            continue  # a path outside of the repository, such as a data directory
        if not exists:
            yield f"path {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    assert find_broken(page, page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("see [the log](docs/none.md#part)", ["link to docs/none.md"]),
        ("see [`log.py`](src/quiver/model.py)", ["link called log.py leads to src/quiver/model.py"]),
        ("in `storage/none.py`", ["path storage/none.py"]),
        ("in `src/quiver/none.py`", ["path src/quiver/none.py"]),
        ("in `tests/none/`", ["path tests/none/"]),
        ("[here](https://example.org/none.md), [above](#part), `groups/1/`, `model.py`, `src/quiver/model.py`", []),
        ("[`model.py`](src/quiver/model.py)\n```\n[x](none.md) `tests/none/`\n```\n", []),
    ],
)
def test_checker_finds_what_leads_nowhere(text: str, broken: list[str]) -> None:
    assert find_broken(ROOT / "README.md", text) == broken
