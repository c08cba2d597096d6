"""What a caller checks of a topic that it asked for. Pure."""

from __future__ import annotations

from quiver.errors import ConflictError
from quiver.wire.messages import CreateTopicRequest


def check_encrypted(request: CreateTopicRequest, *, is_encrypted: bool) -> None:
    """Raise `ConflictError` if encryption was asked for and the topic is there without it.

    A primary that runs an older program does not know the word, and creates a plain topic.
    """
    if request.is_encrypted and not is_encrypted:
        raise ConflictError(
            f"topic {request.topic!r} exists, but is not encrypted: it was created before, or the primary runs an "
            "older program; delete it, upgrade all nodes, and create it again",
            code="not_encrypted",
        )
