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
    """What all requests share; `R` is the response that it gets."""

    response: ClassVar[type[Response]]
    """How its response is read."""

    is_handed_on: bool = False
    """Whether a node has handed it on to the one that it takes for the primary: it is not handed on again."""


class Done(Response, frozen=True):
    """It was done; `index` is the metadata's index that shows it, or 0."""

    index: Index = Index(0)


def request_name(request: Request[Any]) -> str:
    """Return what a request is called on the wire."""
    return str(type(request).__struct_config__.tag)
