"""Examples in README and docs run and print what the page shows; make targets and paths that they name exist.

A fenced block whose info string is `python runnable` is executed; of one that says `console runnable` every
`$ quiver …` line is run and its output compared with the output shown. Blocks of one page share a working
directory, in the page's order.
"""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import msgspec
import pytest

from quiver.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUNNABLE = "runnable"

_FENCE = re.compile(r"^```(?P<language>\w+)(?P<marks>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(msgspec.Struct, frozen=True):
    """One fenced block."""

    language: str
    is_runnable: bool
    body: str


def blocks(text: str) -> list[Block]:
    found = _FENCE.finditer(text)
    return [Block(match["language"], RUNNABLE in match["marks"].split(), match["body"]) for match in found]


def transcript(body: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with the output shown for it."""
    parts = re.split(r"^\$ (.*)$", body, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block begins with a command"
    return [(command, output.strip("\n")) for command, output in zip(parts[1::2], parts[2::2], strict=True)]


def run_command(command: str) -> str:
    """Return the output of a `quiver` command, standard error included."""
    program, *arguments = shlex.split(command)
    assert program == "quiver", f"only quiver commands are runnable here, not {program}"
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        main(arguments)
    return "\n".join(line.rstrip() for line in output.getvalue().rstrip("\n").split("\n"))


def run_page(text: str) -> int:
    """Run a page's runnable blocks in the current directory; return how many there were."""
    runnable = [block for block in blocks(text) if block.is_runnable]
    for block in runnable:
        if block.language == "python":
            exec(compile(block.body, "<documentation>", "exec"), {"__name__": "__main__"})
            continue
        assert block.language == "console"
        for command, shown in transcript(block.body):
            assert run_command(command) == shown, command
    return len(runnable)


@pytest.fixture(autouse=True)
def _in_a_fresh_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _pages_with_examples() -> list[Path]:
    return [page for page in PAGES if any(block.is_runnable for block in blocks(page.read_text()))]


@pytest.mark.parametrize("page", _pages_with_examples(), ids=_name)
def test_examples_do_what_the_page_shows(page: Path) -> None:
    assert run_page(page.read_text()) > 0


def test_readme_has_runnable_examples() -> None:
    assert [block.language for block in blocks((ROOT / "README.md").read_text()) if block.is_runnable] == [
        "python",
        "python",
    ]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_make_targets_that_are_named_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    known = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^\$ )make ([a-z-]+)", page.read_text(), flags=re.MULTILINE))
    assert named <= known


def test_index_lists_every_decision() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text()
    missing = [path.name for path in sorted(folder.glob("[0-9]*.md")) if f"({path.name})" not in index]
    assert missing == [], "add it to docs/adr/README.md"


def test_paths_named_in_the_guarantees_exist() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "README.md").read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_runner_fails_on_an_example_that_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        run_page("```python runnable\n1 / 0\n```\n")


def test_runner_fails_on_output_that_differs() -> None:
    with pytest.raises(AssertionError, match="quiver --version"):
        run_page("```console runnable\n$ quiver --version\nquiver, version 9\n```\n")


def test_runner_leaves_other_blocks_alone() -> None:
    assert run_page("```python\n1 / 0\n```\n\n```console\n$ rm -rf x\n```\n") == 0
