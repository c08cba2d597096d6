"""Keep what a running query has not read yet: a hold on its topics, renewed for as long as the query lives.

The hold is placed before anything is planned, and again at once when there is more to hold: another topic, another
partition. In between a thread renews it, at where the query is by then: a micro-batch may take longer than a hold
lasts, and Spark tells its source nothing meanwhile. A query that ends lets it go; one that is killed leaves it until
it is over. Each life of a query has a hold of its own name, so that two of them never move each other's.
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
"""How often a hold is renewed in the time that it lasts: three renewals may fail in a row."""


def exit_on_sigterm() -> None:
    """Let this process end in order when it is told to: Spark ends a reader's process so, and `stop` runs only then."""
    is_ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit_once)


def _exit_once(*_: object) -> None:
    """Spark may tell more than once: what a process does at its end is not to be cut off by the next."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


class QueryHold:
    """The hold of one stream reader. `move` it with the query; `release` it at the end."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._name = f"{options.group_id or 'spark'}-{uuid4().hex[:8]}"
        self._owner = f"Spark query on {socket.gethostname()}, process {os.getpid()}"
        self._unread: dict[str, dict[int, int]] = {}
        self._topic_ids: dict[str, int] = {}
        self._guard = threading.Lock()
        self._is_over = threading.Event()
        self._renewing: threading.Thread | None = None
        # Spark hangs up first and terminates then: what hanging up began may be cut off once.
        atexit.register(self.release)

    def move(self, start: StreamOffset, end: StreamOffset) -> None:
        """Hold what lies behind `start`, in every partition that `end` knows.

        Raises:
            QuiverError: it cannot be held, and was not before.
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
        """Let the records go, as far as the cluster can be told; idempotent."""
        self._is_over.set()
        with self._guard:
            if not self._unread:
                return
            try:
                connection(self._options.servers).release_hold(self._name)
            except QuiverError as error:
                logger.warning("hold not released, it ends by itself", extra=facts(hold=self._name, error=error))
            self._unread = {}

    def _renew(self) -> None:
        while not self._is_over.wait(self._options.hold_s / RENEWALS):
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
                # There is nothing left to hold; whether that is an error is for who reads to say.
                logger.info("topic not held", extra=facts(topic=topic, hold=self._name, error=error))
