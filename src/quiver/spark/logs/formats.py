"""Formats that a user gives: `{time} {level} [{thread}] {source}: {message}`.

Text stands for itself, blanks for one or more blanks, and a name in braces for a field. `{time}` is a time stamp in any
common notation, `{*}` a part to skip.
"""

from __future__ import annotations

import re
from typing import Final

from quiver.errors import RequestError
from quiver.spark.logs.headers import Layout
from quiver.spark.logs.timestamps import NOTATION

FIELD_NAMES: Final = ("time", "level", "source", "host", "thread", "message")


def layout_of_format(text: str) -> Layout:
    """Return the layout of a format.

    The time may be followed by a notation, as in `{time:syslog}`; without one it is `iso`.

    Raises:
        RequestError: the format has an unknown field, one twice, or no message.
    """
    pattern, notation, seen = "^", "", set()
    for part in re.split(r"(\{[^{}]*\})", text):
        if not part.startswith("{"):
            pattern += r"\s+".join(re.escape(own) for own in re.split(r"\s+", part))
            continue
        name, _, kind = part[1:-1].partition(":")
        if name == "*":
            pattern += r"\S*?"
            continue
        if name not in FIELD_NAMES or name in seen:
            raise _bad(f"{part} is {'there twice' if name in seen else 'unknown'}, known are {', '.join(FIELD_NAMES)}")
        seen.add(name)
        if name == "time":
            notation = kind or "iso"
            if notation not in NOTATION:
                raise _bad(f"the time notation {notation} is unknown, known are {', '.join(NOTATION)}")
            pattern += NOTATION[notation].pattern
        else:
            pattern += "(?P<message>.*)" if name == "message" else rf"(?P<{name}>.*?)"
    if "message" not in seen:
        raise _bad("it has no {message}")
    return Layout(pattern + "$", notation)


def _bad(reason: str) -> RequestError:
    return RequestError(f"the format is not valid: {reason}", code="bad_option")
