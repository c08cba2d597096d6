"""The tables in `docs/security.md`: every attack has its tests, every requirement of ASVS 5.0.0, level 2, its line."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"

REQUIREMENTS = {
    1: (2, 9, 11, 3, 2),
    2: (3, 3, 4, 1),
    3: (0, 2, 4, 6, 5, 0, 2),
    4: (3, 1, 2, 4),
    5: (1, 3, 2, 3),
    6: (3, 12, 4, 4, 5, 3, 0, 4),
    7: (3, 4, 2, 5, 2, 2),
    8: (2, 3, 1, 1),
    9: (3, 4),
    10: (2, 2, 4, 11, 5, 2, 3),
    11: (2, 3, 3, 4, 1, 1, 0),
    12: (3, 2, 4),
    13: (1, 5, 2, 5),
    14: (2, 4, 3),
    15: (3, 3, 7, 0),
    16: (1, 5, 4, 3, 3),
    17: (1, 4, 2),
}
"""By chapter, the requirements of level 1 or 2 in each of its sections; those of level 3 have the last numbers."""
_ROW = re.compile(r"^\| (\d[\d.,– ]*) \| [^|]+ \| (\S[^|]*) \| ([^|]+) \|$", flags=re.MULTILINE)
STATUSES = {"yes", "partly", "not yet", "n/a"}


def _expand(cell: str) -> list[str]:
    """Return the numbers in a cell such as `1.2.6–1.2.8, 1.3.1`."""
    found = []
    for part in cell.split(", "):
        first, _, last = part.partition("–")
        section, _, number = first.rpartition(".")
        last_section, _, last_number = (last or first).rpartition(".")
        assert section == last_section, cell
        found += [f"{section}.{one}" for one in range(int(number), int(last_number) + 1)]
    return found


def test_standard_has_as_many_requirements_as_its_authors_say() -> None:
    assert sum(map(sum, REQUIREMENTS.values())) == 253


def test_every_requirement_has_one_line() -> None:
    listed = Counter(number for cell, _, _ in _ROW.findall(PAGE.read_text()) for number in _expand(cell))
    wanted = {
        f"{chapter}.{section}.{number}"
        for chapter, counts in REQUIREMENTS.items()
        for section, count in enumerate(counts, 1)
        for number in range(1, count + 1)
    }
    assert sorted(wanted - listed.keys()) == []
    assert sorted(listed.keys() - wanted) == []
    assert [number for number, times in listed.items() if times > 1] == []


def test_every_line_says_how_it_stands() -> None:
    rows = _ROW.findall(PAGE.read_text())
    assert {status for _, status, _ in rows} == STATUSES
    assert len(rows) == sum(line.startswith("| ") and line[2].isdigit() for line in PAGE.read_text().splitlines())


def test_every_attack_names_tests_that_exist() -> None:
    section = PAGE.read_text().partition("## Attacks and their tests")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 17
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            path = ROOT / (file if "/" in file else f"tests/security/{file}")
            assert re.search(rf"^(async )?def {test}\(", path.read_text(), flags=re.MULTILINE), (file, test)


def test_every_row_names_tests_that_exist() -> None:
    section = PAGE.read_text().partition("## OWASP ASVS")[2]
    named = set(re.findall(r"`(tests/[\w/.]+)`", section))
    assert len(named) > 50
    assert [one for one in sorted(named) if not (ROOT / one).exists()] == []


def test_console_is_in_the_list() -> None:
    """It has scripts, a login, storage and a redirect: these requirements apply since it exists."""
    rows = {number: (status, how) for cell, status, how in _ROW.findall(PAGE.read_text()) for number in _expand(cell)}
    for number in ("3.2.1", "3.2.2", "3.4.2", "3.7.1", "3.7.2", "6.2.6", "7.4.4", "14.3.1", "14.3.3", "15.3.6"):
        status, how = rows[number]
        assert status in ("yes", "partly"), number
        assert "console" in how, number
        assert re.search(r"`tests/(browser|console|security|unit/gateway)[/\w.]*`", how), number
