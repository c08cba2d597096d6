"""A limit on the processor time of one seed: code that never yields cannot be seen from within the simulated loop.

Processor time and not real time, so that a busy machine cuts nothing off. A campaign goes on with the next seed.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from quiver.testing.simulator.report import CutOff

SECONDS_MAX = 120.0
"""Processor time that a seed may use by default; most take a few seconds."""
_FRAMES_SHOWN = 8


@contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise `CutOff`, with the stack, when the block has used so much processor time.

    Without effect in other threads than the main one: only there can a running block be interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(_: int, frame: FrameType | None) -> None:
        frames = traceback.extract_stack(frame, limit=_FRAMES_SHOWN)
        stack = " > ".join(f"{at.filename.rpartition('/')[2]}:{at.lineno} {at.name}" for at in frames)
        raise CutOff("F3", f"the seed did not end within {seconds:g} s of processor time, at {stack}")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
