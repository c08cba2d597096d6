"""How far a job is, on standard error: a line that changes at a terminal, a line now and then in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from quiver.cli.output import format_count

if TYPE_CHECKING:
    from quiver.spark.pipelines import JobProgress

LINE_EVERY_S = 5.0
"""How often a job that does one thing all the while says so where nothing can be written over."""


class ProgressDisplay:
    """Show what a job tells; use as ``with``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_terminal = sys.stderr.isatty()
        self._told: tuple[str, float] = ("", 0.0)
        self._bar = _ProgressWithLines(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not self._is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(name, total=None)

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def report_progress(self, state: JobProgress) -> None:
        """Show how far the job is."""
        text = f"{self._name}: {describe(state)}"
        self._bar.lines = state.lines
        self._bar.update(self._task, description=text, completed=state.done, total=state.total)
        phrase, told_s = self._told
        now_s = time.monotonic()
        if not self._is_terminal and (state.phrase != phrase or now_s - told_s >= LINE_EVERY_S):
            click.echo("\n  ".join((text, *state.lines)), err=True)
            self._told = (state.phrase, now_s)


class _ProgressWithLines(Progress):
    """A bar, and lines below it."""

    lines: tuple[str, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text("\n".join(self.lines), overflow="ellipsis", no_wrap=True)


def describe(state: JobProgress) -> str:
    """Return what a job does, and how much of it is done."""
    if state.total is not None:
        return f"{state.phrase}, {state.done:,} of {format_count(state.total, state.noun)}"
    return f"{state.phrase}, {format_count(state.done, state.noun)}" if state.done else state.phrase
