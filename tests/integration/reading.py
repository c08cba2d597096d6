"""Reading all that a topic has, however long a busy machine takes: an idle timeout may end too early."""

from __future__ import annotations

import quiver


def read_to_end(consumer: quiver.Consumer) -> list[quiver.Record]:
    """Return the records up to the end; not for members of groups, which have no partitions at first."""
    found: list[quiver.Record] = []
    while consumer.size():
        found += consumer.poll(timeout=1)
    return found
