"""What commands print: a table for people at a terminal, plain columns for pipes, JSON on request.

Output goes to standard output, through click, and nothing else does. Plain output has no colour, no
borders and one line per row, so that `grep`, `cut` and `awk` work on it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | int | None

_GAP = 3
"""What stands between two columns."""
_STYLES = {
    "alive": "green",
    "yes": "green",
    "suspect": "yellow",
    "draining": "yellow",
    "pending": "yellow",
    "dead": "red",
    "no": "red",
    "primary": "bold",
    "-": "dim",
}
"""Words that stand out at a terminal."""


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_json_line(value: object) -> None:
    """Print a value as one line of JSON, for streams."""
    click.echo(msgspec.json.encode(value).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print rows under their column names: as a table at a terminal that is wide enough, else in plain columns."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    is_number = [all(isinstance(row[at], int) for row in rows) for at in range(len(columns))]
    if sys.stdout.isatty() and sum(widths) + _GAP * (len(widths) - 1) <= shutil.get_terminal_size().columns:
        _draw_table(columns, cells, is_number)
        return
    for row in ([*columns], *cells):
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        click.echo("  ".join(padded).rstrip())


def _draw_table(columns: Sequence[str], rows: Sequence[Sequence[str]], is_number: Sequence[bool]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, right in zip(columns, is_number, strict=True):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    Console(file=sys.stdout, highlight=False).print(table)


def _text(cell: Cell) -> str:
    return "-" if cell is None else str(cell)
