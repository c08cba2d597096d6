"""What all requests and responses share. Pure.

A request travels as the head of a frame, tagged with its name; bytes that belong to it (batches, as they are) travel
behind it as the frame's payload. `Request[R]` names the response that it gets. Reading is strict on both sides: a
field that is added later must have a default that means what its absence meant. `messages` says what can be asked.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Meta

from quiver.model import Index

RESULTS_MAX = 100_000
"""Most items of a list in a request or response."""
Name = Annotated[str, Meta(max_length=300)]
Count = Annotated[int, Meta(ge=0, le=2**53)]


class Response(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What all responses share."""


R = TypeVar("R", bound=Response)


class Request(
    msgspec.Struct, Generic[R], frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=True
):
    """What all requests share; `R` is the type of the response."""

    response: ClassVar[type[Response]]
    """The type that the response is decoded to."""
    is_read: ClassVar[bool] = False
    """Whether it changes nothing: after any failure it may be sent again."""
    waits_for_index: ClassVar[bool] = False
    """Whether it is handled only once its receiver has applied the metadata up to `known_index`."""
    is_for_nodes: ClassVar[bool] = False
    """Whether plain clients are refused."""
    _repeatable: ClassVar[bool] = True
    _idempotent: ClassVar[bool] = False
    carries_batches: ClassVar[bool] = False
    """Whether the payload of the request or of its response is batches, which have checksums of their own."""

    is_forwarded: bool = False
    """Whether a node forwarded it to the node that it takes for the primary, which must not forward it again."""
    known_index: Index = Index(0)
    """The metadata index that the sender has seen; `routing` sets it. A receiver that lags behind catches up first, so
    that a client that has just registered is not refused."""

    @property
    def is_repeatable(self) -> bool:
        """Tell whether a client may send it again after an unknown outcome: a repeated delete may hit a new topic."""
        return self._repeatable

    @property
    def is_idempotent(self) -> bool:
        """Tell whether a repeat after success changes nothing and gets the same response."""
        return self.is_read or self._idempotent


class Done(Response, frozen=True):
    """It was done; `index` is the metadata's index that shows it, or 0."""

    index: Index = Index(0)


def request_name(request: Request[Any]) -> str:
    """Return what a request is called on the wire."""
    return str(type(request).__struct_config__.tag)
