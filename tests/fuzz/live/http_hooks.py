"""Hooks of schemathesis: make valid what the document cannot forbid, so that only real findings are left.

OpenAPI has no word for a parameter of a query that needs or excludes another one, nor for a bound that depends on the
program that leads the cluster, nor for the characters that passwords may have (RFC 4013).
"""

from __future__ import annotations

from typing import Any

import schemathesis

from quiver.features import LEVEL_MAX
from quiver.security.scram import PASSWORD_LENGTH_MAX, PASSWORD_LENGTH_MIN


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Give a partition wherever an offset is given, no name to the cluster, a plain password, the highest level."""
    query, body = case.query, case.body
    if isinstance(query, dict) and query.get("offset") is not None and query.get("partition_id") is None:
        query["partition_id"] = 0
    if isinstance(query, dict) and query.get("kind") == "cluster":
        query.pop("name", None)
    if not isinstance(body, dict):
        return
    level, password = body.get("level"), body.get("password")
    if case.path == "/cluster/upgrade" and isinstance(level, int | float) and level >= 1:  # 7.0 is an integer of JSON
        body["level"] = LEVEL_MAX
    if isinstance(password, str) and PASSWORD_LENGTH_MIN <= len(password) <= PASSWORD_LENGTH_MAX:
        body["password"] = "p" * len(password)
