"""Checks the arguments of the SDK's public calls against their annotations, before anything is done.

A wrong type gets a sentence that names the argument and says what to pass instead (`bad_argument`), not an error from
deep inside. `check_arguments` wraps the public methods of a class, `checked` one function. Values of records are not
checked here: a producer checks them on its own, faster path.

Annotations are compared as they are written, so a call costs a few dictionary lookups. One without a row in `_CHECKS`
is not checked; a test names those, so that a new one is not forgotten.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, TypeVar

from quiver.client.queue_jobs import LeasedJob
from quiver.errors import OutOfRangeError, RequestError
from quiver.security.limits import QuotaLimits
from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.secrets import HIDDEN, Secret
from quiver.wire.messages import RetentionInfo

INT_END: Final = 1 << 63
"""Numbers are signed and have 64 bits on the wire."""

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[Any], Any]
"""Returns the argument, perhaps as another type; raises `TypeError` or `ValueError` with what to pass instead."""


def check_arguments(cls: C) -> C:
    """Check the arguments of all public methods of a class."""
    for name, method in list(vars(cls).items()):
        if not name.startswith("_") and inspect.isfunction(method):
            setattr(cls, name, checked(method))
    return cls


def checked(function: F) -> F:
    """Check the arguments of a function; it is returned unchanged if no annotation can be checked."""
    parameters = inspect.signature(function).parameters
    checks = {name: found for name, one in parameters.items() if (found := _find_check(one.annotation)) is not None}
    if not checks:
        return function
    names = tuple(parameters)
    rest = next((name for name, one in parameters.items() if one.kind is one.VAR_POSITIONAL), "")

    def check_all(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        arguments = list(given)
        for at, value in enumerate(given):
            name = names[at] if at < len(names) and not (rest and at >= names.index(rest)) else rest
            if name in checks:
                arguments[at] = _check(function, name, checks[name], value)
        for name, value in named.items():
            if name in checks:
                named[name] = _check(function, name, checks[name], value)
        return tuple(arguments)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*given: Any, **named: Any) -> Any:
            return await function(*check_all(given, named), **named)

        return call_async  # type: ignore[return-value] # the same parameters and result

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return function(*check_all(given, named), **named)

    return call  # type: ignore[return-value] # the same parameters and result


def _check(function: Callable[..., Any], name: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        shown = f"{HIDDEN} ({kind})" if check is _secret else f"{value!r:.60} ({kind})"
        message = f"not done: {function.__name__}() was given {name}={shown}; {error}"
        if isinstance(error, TypeError):
            raise RequestError(message, code="bad_argument") from None
        raise OutOfRangeError(message) from None


def _find_check(annotation: Any) -> Check | None:
    if not isinstance(annotation, str):
        return None
    required = annotation.removesuffix(" | None")
    check = _text if required.startswith("Literal[") else _CHECKS.get(required)
    return check if check is None or required == annotation else _optional(check)


# -- what can be checked ------------------------------------------------------------------------------


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise TypeError("pass a text (str); decode bytes first" if isinstance(value, bytes) else "pass a text (str)")
    return value


def _secret(value: Any) -> Any:
    return value if isinstance(value, Secret) else _text(value)


def _verb(value: Any) -> Any:
    return _one_of(Verb, value)


def _resource_kind(value: Any) -> Any:
    return _one_of(ResourceKind, value)


def _one_of(kind: type[StrEnum], value: Any) -> Any:
    if value not in set(kind):
        raise TypeError(f"pass one of {', '.join(kind)}")
    return kind(value)


def _limits(value: Any) -> Any:
    if not isinstance(value, QuotaLimits):
        raise TypeError("pass quiver.security.limits.QuotaLimits(requests_per_second=..., topics_max=..., ...)")
    return value


def _grant(value: Any) -> Any:
    if not isinstance(value, Grant):
        raise TypeError("pass quiver.security.permissions.Grant(subject=..., verb=..., kind=..., name=...)")
    return value


def _int(value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("pass a whole number (int)")
    if not -INT_END <= value < INT_END:
        raise ValueError("pass a number of at most 64 bits")
    return value


def _number(value: Any) -> Any:
    if _int(value) < 0:
        raise ValueError("pass a whole number from 0 on")
    return value


def _seconds(value: Any) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError("pass a number of seconds (int or float)")
    if math.isnan(value):
        raise ValueError("pass a number of seconds")
    return value


def _numbers(value: Any) -> Any:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError("pass a list of whole numbers, as in [0, 2]")
    return tuple(map(_number, value))


def _offsets(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError("pass an offset by partition, as in {0: 1200, 1: 900}")
    return {_number(partition): _number(offset) for partition, offset in value.items()}


def _moment(value: Any) -> Any:
    return value if isinstance(value, datetime) else _int(value)


def _position(value: Any) -> Any:
    return value if isinstance(value, str | datetime) else _int(value)


def _positions(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_number(partition): _position(one) for partition, one in value.items()}
    return _position(value)


def _topics(value: Any) -> Any:
    if isinstance(value, str | re.Pattern):
        return value
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError("name a topic, a list of topics, or a pattern: re.compile('logs-.*')")
    return tuple(map(_text, value))


def _addresses(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(
            "pass an address of a node, as in '127.0.0.1:9002', or a list of them; "
            "nothing at all means QUIVER_URL, the context in use, or this machine"
        )
    return tuple(map(_text, value))


def _retention(value: Any) -> Any:
    if not isinstance(value, RetentionInfo):
        raise TypeError("pass quiver.RetentionInfo(ms=..., bytes=...)")
    return value


def _schema(value: Any) -> Any:
    # Not by its class: pyarrow is optional, and slow to import.
    if type(value).__name__ != "Schema":
        raise TypeError("pass a pyarrow.Schema")
    return value


def _jobs(value: Any) -> Any:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError("pass jobs, as receive() returns them")
    jobs = tuple(value)
    if not all(isinstance(job, LeasedJob) for job in jobs):
        raise TypeError("pass jobs, as receive() returns them")
    return jobs


def _callback(value: Any) -> Any:
    if not callable(value):
        raise TypeError("pass a function of one argument")
    return value


_CHECKS: Final[Mapping[str, Check]] = {
    "str": _text,
    "str | Secret": _secret,
    "Verb": _verb,
    "ResourceKind": _resource_kind,
    "Grant": _grant,
    "QuotaLimits": _limits,
    "int": _number,
    "Shift": _int,
    "float": _seconds,
    "Iterable[int]": _numbers,
    "Mapping[int, int]": _offsets,
    "int | datetime": _moment,
    "SeekTarget": _position,
    "OffsetSpecs": _positions,
    "ScanBound": _positions,
    "str | re.Pattern[str] | Iterable[str]": _topics,
    "str | Iterable[str]": _addresses,
    "RetentionInfo": _retention,
    "pa.Schema": _schema,
    "OnProgress": _callback,
    "OnPartitions": _callback,
    "Iterable[LeasedJob]": _jobs,
}
