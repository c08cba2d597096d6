"""How objects of the SDK show themselves: one line in a console, a small table in a notebook. Pure.

Both are made from the same facts, which an object knows without asking the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def describe(kind: type, facts: Mapping[str, object]) -> str:
    """Return an object as text: `<Consumer topic='logs' name='report'>`; facts that are None are left out."""
    shown = " ".join(f"{name}={value!r}" for name, value in facts.items() if value is not None)
    return f"<{kind.__name__} {shown}>"


def html_table(kind: type, facts: Mapping[str, object]) -> str:
    """Return an object as an HTML table with a row for each fact."""
    rows = [(name, value) for name, value in facts.items() if value is not None]
    return html_rows(kind.__name__, ("", ""), rows)


def html_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as an HTML table under a title."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns) if any(columns) else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(_text(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _text(cell: object) -> str:
    if isinstance(cell, tuple | list):
        return ", ".join(map(_text, cell))
    return "–" if cell is None else f"{cell:,}" if type(cell) is int else str(cell)
