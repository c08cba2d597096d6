"""Show the progress of a job on standard error: a live line on a terminal, periodic lines in a pipe."""

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
"""Interval of repeated progress lines when standard error is not a terminal."""


class ProgressDisplay:
    """Display the progress of a job; use as ``with``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_terminal = sys.stderr.isatty()
        self._last_line: tuple[str, float] = ("", 0.0)
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
        """Display the job's progress."""
        text = f"{self._name}: {describe(state)}"
        self._bar.lines = state.lines
        self._bar.update(self._task, description=text, completed=state.done, total=state.total)
        phrase, shown_s = self._last_line
        now_s = time.monotonic()
        if not self._is_terminal and (state.phrase != phrase or now_s - shown_s >= LINE_EVERY_S):
            click.echo("\n  ".join((text, *state.lines)), err=True)
            self._last_line = (state.phrase, now_s)


class _ProgressWithLines(Progress):
    """A progress bar with lines below it."""

    lines: tuple[str, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text("\n".join(self.lines), overflow="ellipsis", no_wrap=True)


def describe(state: JobProgress) -> str:
    """Describe what a job does, and how much of it is done."""
    if state.total is not None:
        return f"{state.phrase}, {state.done:,} of {format_count(state.total, state.noun)}"
    return f"{state.phrase}, {format_count(state.done, state.noun)}" if state.done else state.phrase
