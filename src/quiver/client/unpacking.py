"""Decompresses batches in a thread while the event loop receives further ones.

A table is built when its last record has arrived, and decompression is most of that work: without a thread, nodes would
wait meanwhile, and a client would decompress on the thread that also reads the sockets and decrypts.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from quiver.model import Buffer
from quiver.record import Batch

UNPACKED_BYTES_MIN: Final = 64 * 1024
"""Smaller batches are decompressed faster than a thread takes them."""


class BatchUnpacker:
    """Decompress the batches that it is given; a batch keeps its payload. Use as ``with``, on one thread."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[tuple[Batch, Future[Buffer]]] = []

    def __enter__(self) -> Self:
        return self

    def add(self, batch: Batch) -> None:
        """Decompress a batch soon, if it is large enough and compressed."""
        if not batch.header.compression or batch.header.raw_bytes < UNPACKED_BYTES_MIN:
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quiver-unpack")
        with suppress(RuntimeError):  # the interpreter exits: it starts no more threads
            self._pending.append((batch, self._executor.submit(batch.payload)))

    def finish(self) -> None:
        """Return when all are decompressed: this thread begins with the last, the other continues with the first.

        Raises:
            DecodeError: a batch cannot be decompressed.
        """
        while self._pending:
            batch, unpacked = self._pending.pop()
            if unpacked.cancel():
                batch.payload()
            else:
                unpacked.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
