"""A request's parameters, wherever they are: in its path, its query, or its body as JSON; on any method.

Read leniently where old clients need it (digits for numbers, null for nothing, whatever content type) and strictly
where two readers could differ: what is given twice is refused. A value of the wrong kind is malformed (`bad_request`),
one of the right kind outside its bounds is `out_of_range`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from quiver.errors import OutOfRangeError, RequestError
from quiver.gateway.contract import Parameters

P = TypeVar("P", bound=Parameters)

QUERY_FIELDS_MAX = 50
KNOWN_MAX = 4_096
"""How many queries are remembered as read: a consumer asks with the same one again and again."""
KNOWN_BYTES_MAX = 256
"""A query that is longer is not remembered."""
_BOUNDS = re.compile(r"Expected `\w+` (?:>|<|of length|matching)|out of range|Invalid enum value")
"""What msgspec says of a value that has the right type."""
_PLACE = re.compile(r" - at `\$\.?(?P<place>.*)`$")

_any_decoder = msgspec.json.Decoder(dict[str, Any])


class ParameterReader(Generic[P]):
    """Read the parameters of one route."""

    def __init__(self, kind: type[P]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind, strict=False)
        self._known: dict[bytes, P] = {}

    def read(self, path_values: Mapping[str, str], query: bytes, body: bytes) -> P:
        """Return the parameters.

        Raises:
            RequestError: they cannot be read, one is missing, or one is given twice.
            OutOfRangeError: one has a value that is never allowed.
        """
        try:
            if not path_values and not query:
                return self._decoder.decode(body or b"{}")
            if not path_values and not body:
                return self._known.get(query) or self._learn(query)
            given = _any_decoder.decode(body) if body else {}
            return self._convert(given, (*path_values.items(), *_split_query(query)))
        except msgspec.ValidationError as error:
            raise _explain(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"not done: the body is not JSON: {error}") from None

    def _learn(self, query: bytes) -> P:
        """Read a query that stands alone, and remember what it says; what was read cannot be changed."""
        read = self._convert({}, _split_query(query))
        if len(query) <= KNOWN_BYTES_MAX:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[query] = read
        return read

    def _convert(self, given: dict[str, Any], fields: Iterable[tuple[str, str]]) -> P:
        for name, value in fields:
            if name in given:
                raise RequestError(f"not done: {name!r} is given twice", code="given_twice")
            given[name] = value
        return msgspec.convert(given, self._kind, strict=False)


def _split_query(query: bytes) -> list[tuple[str, str]]:
    fields = [field for field in query.split(b"&") if field]
    if len(fields) > QUERY_FIELDS_MAX:
        raise RequestError(f"not done: more than {QUERY_FIELDS_MAX} parameters in the query")
    pairs = (field.partition(b"=")[::2] for field in fields)
    return [(_decode(name), _decode(value)) for name, value in pairs]


def _decode(text: bytes) -> str:
    try:
        return unquote_to_bytes(text.replace(b"+", b" ")).decode()
    except UnicodeDecodeError:
        raise RequestError("not done: the query is not UTF-8") from None


def _explain(complaint: str) -> RequestError:
    """Return the error for what msgspec complains of, in words that name the parameter."""
    place = _PLACE.search(complaint)
    where = f"{place['place']}: " if place and place["place"] else ""
    sentence = f"not done: {where}{_PLACE.sub('', complaint)}"
    return OutOfRangeError(sentence) if _BOUNDS.search(complaint) else RequestError(sentence)
