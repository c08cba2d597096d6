"""Hooks of schemathesis: make valid what the document cannot forbid, so that only real findings are left.

OpenAPI has no word for a parameter of a query that needs or excludes another one, nor for a bound that depends on the
program that leads the cluster, nor for the characters that passwords may have (RFC 4013), nor
for what the characters of a receipt say.
"""

from __future__ import annotations

from typing import Any

import schemathesis

from quiver.errors import RequestError
from quiver.features import LEVEL_MAX
from quiver.gateway.queue_contract import RECEIPT_LENGTH_MAX, RECEIPT_LENGTH_MIN
from quiver.gateway.queue_handlers import ReceiptToken, decode_receipt, encode_receipt
from quiver.model import ConsumerId, PartitionId, TopicId
from quiver.security.scram import PASSWORD_LENGTH_MAX, PASSWORD_LENGTH_MIN

SOME_RECEIPT = encode_receipt(ReceiptToken(TopicId(1), PartitionId(0), ConsumerId(1), 0, 1))


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Give a partition wherever an offset is given, no name to the cluster, a plain password, the highest level.

    Records are looked at from one place only.

    Texts that have the length of a receipt become receipts.
    """
    query, body = case.query, case.body
    if case.path == "/topics/{topic}/records" and isinstance(query, dict):
        for name in [name for name in ("from", "offset", "time_ms") if query.get(name) is not None][1:]:
            query.pop(name)
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
    if case.path == "/consumers/{consumer_id}/reset" and isinstance(body.get("offset"), int | float):
        body["offset"] = 0  # beyond the end it is refused
    if case.path == "/topics/{topic}" and isinstance(body.get("partitions"), int | float):
        body.update(partitions=None, retention=body.get("retention") or {})  # their number can only grow
    _give_receipts(body)


def _give_receipts(body: dict[str, Any]) -> None:
    """Replace made-up texts by a receipt, and the group by one that does not exist: a receipt is of one group."""
    given = [body.get("receipt"), *(body["receipts"] if isinstance(body.get("receipts"), list) else ())]
    made_up = [one for one in given if isinstance(one, str) and _is_made_up(one)]
    if not made_up:
        return
    if body.get("receipt") in made_up:
        body["receipt"] = SOME_RECEIPT
    if isinstance(body.get("receipts"), list):
        body["receipts"] = [SOME_RECEIPT if one in made_up else one for one in body["receipts"]]
    if isinstance(body.get("group"), str) and body["group"]:
        body["group"] = "nobody's"


def _is_made_up(text: str) -> bool:
    if not RECEIPT_LENGTH_MIN <= len(text) <= RECEIPT_LENGTH_MAX:
        return False  # refused for its length, as the document says
    try:
        decode_receipt(text)
    except RequestError:
        return True
    return False
