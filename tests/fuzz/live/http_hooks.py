"""Hooks of schemathesis: make valid what the document cannot forbid, so that only real findings are left.

OpenAPI has no word for a parameter of a query that needs another one, nor for a bound that depends on the program that
leads the cluster.
"""

from __future__ import annotations

from typing import Any

import schemathesis

from quiver.features import LEVEL_MAX


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Give a partition wherever an offset is given, and ask for the highest feature level."""
    query, body = case.query, case.body
    if isinstance(query, dict) and query.get("offset") is not None and query.get("partition_id") is None:
        query["partition_id"] = 0
    is_upgrade = case.path == "/cluster/upgrade"
    if is_upgrade and isinstance(body, dict) and isinstance(body.get("level"), int) and body["level"] >= 1:
        body["level"] = LEVEL_MAX
