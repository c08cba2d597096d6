"""Protect unread records of a running query from retention: a hold on its topics, renewed while the query runs.

The hold is placed before planning, and again immediately when a topic or partition is added. A thread renews it at the
query's current offsets, because a micro-batch may run longer than the hold and Spark does not call its source
meanwhile. A query that stops releases its hold; the hold of a killed query expires. Each start of a query uses a new
hold name, so two runs of one query never move each other's hold.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
import threading
from typing import Final
from uuid import uuid4

from quiver.errors import ConflictError, NotFoundError, QuiverError
from quiver.logs import facts
from quiver.spark.connections import connection
from quiver.spark.offsets import StreamOffset, topic_id_of
from quiver.spark.options import ReadOptions

logger = logging.getLogger(__name__)

RENEWALS: Final = 4
"""Renewals per hold duration: three renewals may fail in a row before the hold expires."""


def exit_on_sigterm() -> None:
    """Exit normally on SIGTERM, so that exit handlers run: Spark terminates a reader's process this way."""
    is_ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit_once)


def _exit_once(*_: object) -> None:
    """Exit, and ignore further signals: Spark may send several, which must not interrupt the exit handlers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


class QueryHold:
    """The hold of one stream reader: `move` it as the query advances, `release` it at the end."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._name = f"{options.group_id or 'spark'}-{uuid4().hex[:8]}"
        self._owner = f"Spark query on {socket.gethostname()}, process {os.getpid()}"
        self._unread: dict[str, dict[int, int]] = {}
        self._topic_ids: dict[str, int] = {}
        self._guard = threading.Lock()
        self._stopped = threading.Event()
        self._renewing: threading.Thread | None = None
        # Spark closes the connection, then sends SIGTERM, which may interrupt stop(): release again at exit.
        atexit.register(self.release)

    def move(self, start: StreamOffset, end: StreamOffset) -> None:
        """Hold all records from `start` on, in every partition of `end`.

        Raises:
            QuiverError: a topic or partition that was not held before cannot be held.
        """
        if not self._options.hold_s:
            return
        unread = start.unread(end)
        with self._guard:
            has_more = any(unread[topic].keys() - self._unread.get(topic, {}).keys() for topic in unread)
            self._unread = unread
            self._topic_ids = {topic: topic_id_of(own.id) for topic, own in end.topics.items()}
            if has_more:
                self._place()
        if self._renewing is None:
            self._renewing = threading.Thread(target=self._renew, name="quiver-hold", daemon=True)
            self._renewing.start()

    def release(self) -> None:
        """Release the hold, or log a warning if the cluster cannot be reached; idempotent."""
        self._stopped.set()
        with self._guard:
            if not self._unread:
                return
            try:
                connection(self._options.servers).release_hold(self._name)
            except QuiverError as error:
                logger.warning("hold not released, it expires", extra=facts(hold=self._name, error=error))
            self._unread = {}

    def _renew(self) -> None:
        while not self._stopped.wait(self._options.hold_s / RENEWALS):
            with self._guard:
                try:
                    self._place()
                except QuiverError as error:
                    logger.warning("hold not renewed", extra=facts(hold=self._name, error=error))

    def _place(self) -> None:
        for topic, offsets in self._unread.items():
            try:
                connection(self._options.servers).hold(
                    topic,
                    self._name,
                    offsets,
                    lasting=self._options.hold_s,
                    owner=self._owner,
                    topic_id=self._topic_ids[topic],
                )
            except (NotFoundError, ConflictError) as error:
                if error.code not in ("unknown_topic", "topic_recreated"):
                    raise
                # Nothing is left to hold; the reader decides whether that fails the query.
                logger.info("topic not held", extra=facts(topic=topic, hold=self._name, error=error))
