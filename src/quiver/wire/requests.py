"""The base types of requests and responses. Pure.

A request is the head of a frame, tagged with its name; its bytes, such as batches, follow as the frame's payload.
`Request[R]` names the type of its response. A field that is added later must have a default with the meaning that its
absence had: it is not sent to programs that do not know it (`quiver.features`), and unknown fields are ignored.
`messages`, `admin_messages`, `security_messages`, `group_messages` and `queue_messages` define the requests.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Meta

from quiver.model import ID_MAX, TERM_MAX, Index, PartitionId, ProducerId

ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""Most bytes of batches in one answer, whatever the request asks for; a single larger batch is sent alone."""
ANSWER_BYTES_MIN = 1024 * 1024
"""Bytes that are reserved for batches at least: an answer has one batch, however few bytes the request asks for."""
RESULTS_MAX = 100_000
"""Most items of a list in a request or response."""
Name = Annotated[str, Meta(max_length=300)]
ActingName = Annotated[str, Meta(max_length=4_000)]
"""A principal, and the roles that an identity provider gives it."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
DecodedRoom = Count
"""The room that a sender has for records, or batches, once they are decoded; 0: as much as they take. If already the
first takes more, nothing is done, and `large_bytes` of the response says how much: ask again with that room."""
LargeBytes = Count
"""Not 0: nothing was done, and the rest of the response means nothing; see `DecodedRoom`."""
Epoch = Annotated[int, Meta(ge=0, le=TERM_MAX)]
PartitionNumber = Annotated[PartitionId, Meta(ge=0, le=ID_MAX)]
ProducerNumber = Annotated[ProducerId, Meta(ge=0, le=ID_MAX)]
Session = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
TimeMs = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
"""A moment in milliseconds since 1970."""
FeatureLevelNumber = Annotated[int, Meta(ge=0, le=0xFFFF)]


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all responses."""


R = TypeVar("R", bound=Response)


class Request(msgspec.Struct, Generic[R], frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of all requests; `R` is the type of the response."""

    response: ClassVar[type[Response]]
    """The type that the response is decoded to."""
    is_read: ClassVar[bool] = False
    """Whether it changes nothing, so that it may be repeated after any failure."""
    waits_for_index: ClassVar[bool] = False
    """Whether it is handled only once its receiver has applied the metadata up to `known_index`."""
    is_for_nodes: ClassVar[bool] = False
    """Whether it is refused if a client sends it."""
    _repeatable: ClassVar[bool] = True
    _idempotent: ClassVar[bool] = False
    carries_batches: ClassVar[bool] = False
    """Whether the payload of the request or of its response is batches, which have checksums of their own."""

    # On the wire it keeps the name that programs of feature level 1 know: they refuse unknown fields.
    is_forwarded: bool = msgspec.field(default=False, name="is_handed_on")
    """Whether a node forwarded it to the primary that it knows; the receiver must not forward it again."""
    known_index: Index = Index(0)
    """The metadata index that the sender has seen; `routing` sets it. A receiver that lags behind catches up first, so
    that a client that has just registered is not refused."""
    on_behalf_of: ActingName = ""
    """The principal for which a node sends it; believed only of nodes. Empty: the sender's own."""

    @property
    def is_repeatable(self) -> bool:
        """Whether a client may repeat it after an unknown outcome; a repeated delete may hit a new topic."""
        return self._repeatable

    @property
    def is_idempotent(self) -> bool:
        """Whether a repeat after success changes nothing and gets the same response."""
        return self.is_read or self._idempotent

    @property
    def is_long_poll(self) -> bool:
        """Whether it may wait at its receiver until there is something to answer."""
        return bool(getattr(self, "wait_ms", 0))

    @property
    def answer_bytes(self) -> int:
        """How many bytes of batches the answer may have; they are reserved before anything is read."""
        return min(getattr(self, "bytes_max", 0), ANSWER_BYTES_MAX)


class Done(Response, frozen=True):
    """The request was done; `index` is the metadata index that contains the change, or 0."""

    index: Index = Index(0)


def request_name(request: Request[Any]) -> str:
    """Return a request's name on the wire."""
    return str(type(request).__struct_config__.tag)
