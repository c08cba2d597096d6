"""Made-up requests of every type that a node has a rule for: what may be in their fields, and who may get an answer.

The types are those of `access.rules.RULES`, so that none can be forgotten; the values follow the declared types of the
fields: most of them plausible (names and numbers that exist), some extreme, some of another type.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import inspect

from quiver.access.rules import RULES
from quiver.model import ProducerId
from quiver.record import Compression, build_batch
from quiver.security.certificates import make_key, make_request
from quiver.wire.requests import Request

Body = dict[str, Any]

KINDS: dict[str, type[Request[Any]]] = {str(kind.__struct_config__.tag): kind for kind in RULES}
"""Every type of request, by its name on the wire."""
UNKNOWN = "nonsense"
"""A type that no node knows."""
PUBLIC = frozenset(("authenticate", "begin_scram", "finish_scram"))
"""What strangers may send."""
FOR_USERS = PUBLIC | frozenset(
    (
        "get_metadata",
        "describe_node",
        "list_clients",
        "list_holds",
        "explain_replica",
        "place_hold",
        "release_hold",
        "register_producer",
        "register_consumer",
        "forget_client",
        "produce",
        "begin_epoch",
        "fetch",
        "read_replica",
        "find_offset",
        "consume",
        "take_each",
        "get_cursors",
        "move_cursor",
        "queue_receive",
        "queue_settle",
        "get_queue",
        "join_group",
        "group_heartbeat",
        "leave_group",
        "describe_groups",
        "configure_group",
        "delete_group",
        "restart_group",
        "explain_access",
    )
)
"""What may succeed for a user who may read and write a few topics; the success of anything else is a finding."""
ABOUT_ALL = frozenset(("get_metadata", "describe_groups", "release_hold"))
"""Of these, the ones that leave out what their sender may not see, instead of being refused."""
ROUGH = frozenset(
    (
        "drain_broker",
        "remove_broker",
        "add_manager",
        "remove_manager",
        "delete_topic",
        "submit_command",
        "heartbeat",
        "upgrade_cluster",
        "set_quota",
    )
)
"""What may leave a node that serves nobody, if an administrator sends it: last, when only its health is judged."""
NUMBERS = (0, 1, 2, 3, 7, -1, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 40, (1 << 53) - 1, 1 << 53, 1 << 62, (1 << 64) - 1)
TEXTS = ("", "x", "x" * 400, "\0", "é", "user:", "*", "1")
CSR = make_request(make_key(), 9)
LEARNED = {
    "producer_id": ("producer_id", "id"),
    "consumer_id": ("consumer_id", "group_id", "id"),
    "group_id": ("group_id", "consumer_id"),
    "topic_id": ("topic_id",),
    "member_id": ("member_id",),
    "epoch": ("epoch",),
    "grant": ("grant",),
    "session": ("session",),
    "token_id": ("token_id",),
}
"""By the field of an answer, the fields of later requests that it is for."""
LEARNED_MAX = 6
_RARE = {"is_handed_on": 0.02, "known_index": 0.02, "on_behalf_of": 0.02} | dict.fromkeys(
    ("partitions", "producer_id", "consumer_id"), 0.2
)
"""How often optional fields are given that honest clients leave alone, or that mostly lead to a refusal."""


@dataclass
class Pool:
    """Values that mean something to the node, by the field's name on the wire: given, and learned from answers."""

    given: dict[str, Sequence[Any]] = field(default_factory=dict)
    _learned: dict[str, deque[Any]] = field(default_factory=dict)

    def choose(self, name: str, rng: random.Random) -> tuple[Any] | None:
        """Return a value for a field, or None if there is none."""
        known = (*self.given.get(name, ()), *self._learned.get(name, ()))
        return (rng.choice(known),) if known else None

    def learn(self, response: Mapping[str, Any]) -> None:
        """Remember the ids that an answer gives."""
        for name, value in response.items():
            for alias in LEARNED.get(name, ()):
                self._remember(alias, value)
        if "producer_id" in response:
            self._remember("producer", (response["producer_id"], response["epoch"]))

    def _remember(self, name: str, value: Any) -> None:
        self._learned.setdefault(name, deque(maxlen=LEARNED_MAX)).append(value)


def basic_pool(topics: Mapping[str, int]) -> Pool:
    """Return the pool of a node with these topics, by name and id."""
    ids = (1, 2)
    names = (*topics, *topics, "none")
    return Pool(
        {
            "topic": names,
            "topic_id": (*topics.values(), *topics.values(), 99),
            "partition_id": (0,) * 9 + (1,),
            "epoch": (1,),
            "session": (0,),
            "first": (0, 1, 2),
            "count": (1, 2),
            "partitions": (1, 2, 3),
            "replicas": (1, None),
            "group": ("workers", "readers", "none"),
            "group_id": ids,
            "consumer_id": ids,
            "producer_id": ids,
            "id": ids,
            "request_id": ("", "one", "two"),
            "lease_ms": (1, 1_000, 60_000, None),
            "records_max": (1, 10),
            "cursors": ((1, 0), (2, "latest")),
            "offset": (0, 1, 2),
            "bytes_max": (0, 100, 1 << 20),
            "wait_ms": (0, 0, 1, 100),
            "lasting_ms": (1, 1_000, 60_000),
            "pause_ms": (0, 1),
            "node": (1, 2),
            "broker": (1, 2),
            "user": ("mallory", "trent", "new"),
            "role": ("ops", "admin", "new"),
            "pattern": ("",),
            "subject": ("user:mallory", "role:ops", "topic:open", "anonymous"),
            "principal": ("user:mallory", "user:trent", "user:admin", "anonymous"),
            "owner": ("user:mallory", "user:trent", ""),
            "on_behalf_of": ("user:admin", "user:trent", "node:1"),
            "known_index": (0, 1, 5),
            "is_handed_on": (False,),
            "member_id": ("", "m"),
            "name": ("held", *names),
            "csr": (CSR,),
            "level": (None, 1, 2, 3),
        }
    )


def make_body(name: str, pool: Pool, rng: random.Random) -> Body:
    """Return the body of a request of a type; nearly always it can be decoded."""
    if name not in KINDS:
        return {"type": name, **{text: _number(rng) for text in ("topic_id", "offset")}}
    found = inspect.type_info(KINDS[name])
    assert isinstance(found, inspect.StructType)
    body: Body = {"type": name, **_make_fields(found, pool, rng)}
    if rng.random() < 0.1:
        body[rng.choice(found.fields).encode_name] = _anything(rng)
    return body


def make_payload(name: str, pool: Pool, rng: random.Random) -> bytes:
    """Return what follows a request: a batch after `produce`, mostly, else nothing or noise."""
    if name == "produce" and rng.random() < 0.9:
        return make_batch(pool, rng)
    return rng.randbytes(rng.choice((0,) * 18 + (100, 70_000)))


def make_batch(pool: Pool, rng: random.Random) -> bytes:
    """Return a batch of a few records, mostly the first of a producer that is registered; sometimes damaged."""
    chosen = pool.choose("producer", rng)
    producer_id, epoch = (1, 1) if chosen is None else chosen[0]
    batch = build_batch(
        [rng.randbytes(rng.choice((0, 10, 1_000))) for _ in range(rng.randrange(1, 4))],
        timestamp=rng.choice((0, 1_700_000_000_000, 1 << 60)),
        compression=rng.choice((Compression.NONE, Compression.ZSTD)),
        producer_id=ProducerId(producer_id),
        producer_epoch=epoch,
        base_sequence=rng.choice((0, 0, 0, 1, 1 << 30)),
    )
    return mutate(batch, rng) if rng.random() < 0.3 else batch


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return data with a few bits changed, sometimes cut."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed[: rng.randrange(1, len(changed))] if rng.random() < 0.3 else changed)


# -- values by type ----------------------------------------------------------------------------------


def _make_fields(kind: inspect.StructType, pool: Pool, rng: random.Random) -> Body:
    made: Body = {}
    for one in kind.fields:
        chance = _RARE.get(one.encode_name, 0.6)
        if one.required or rng.random() < chance:
            made[one.encode_name] = _make_field(one, pool, rng)
    return made


def _make_field(one: inspect.Field, pool: Pool, rng: random.Random) -> Any:
    chosen = pool.choose(one.encode_name, rng) if rng.random() < 0.85 else None
    if chosen is not None and (isinstance(chosen[0], int) or not isinstance(one.type, inspect.IntType)):
        return list(chosen) if isinstance(one.type, inspect.VarTupleType) else chosen[0]
    return _make(one.type, one.encode_name, pool, rng)


def _make(kind: inspect.Type, name: str, pool: Pool, rng: random.Random) -> Any:
    """Return a value of a type; `name` is that of the field that it is for."""
    match kind:
        case inspect.UnionType():
            return _make(rng.choice(kind.types), name, pool, rng)
        case inspect.StructType():
            fields = _make_fields(kind, pool, rng)
            return [fields.get(one.encode_name, 1) for one in kind.fields] if kind.array_like else fields
        case inspect.VarTupleType() | inspect.ListType():
            return [_make_item(kind.item_type, name, pool, rng) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        case inspect.TupleType():
            return [_make(one, name, pool, rng) for one in kind.item_types]
        case inspect.CustomType() | inspect.AnyType() | inspect.DictType():
            return _anything(rng)
        case _:
            return _make_scalar(kind, rng)


def _make_item(kind: inspect.Type, name: str, pool: Pool, rng: random.Random) -> Any:
    chosen = pool.choose(name.removesuffix("s"), rng)
    fits = chosen is not None and isinstance(kind, inspect.IntType if isinstance(chosen[0], int) else inspect.StrType)
    return chosen[0] if chosen is not None and fits else _make(kind, name, pool, rng)


def _make_scalar(kind: inspect.Type, rng: random.Random) -> Any:
    match kind:
        case inspect.IntType():
            return _number_between(kind, rng)
        case inspect.FloatType():
            return rng.choice((0.0, 1.5, -1.0, float("inf"), float("nan"), 1e300))
        case inspect.StrType():
            text = rng.choice(TEXTS)
            return "ab" * 32 if kind.pattern else text[: kind.max_length]
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.LiteralType():
            return rng.choice(kind.values)
        case inspect.EnumType():
            return rng.choice([one.value for one in kind.cls])
        case inspect.NoneType():
            return None
        case inspect.BytesType():
            return rng.randbytes(rng.randrange(40))
        case _:
            raise TypeError(f"made_requests knows no values of {kind}")


def _number_between(kind: inspect.IntType, rng: random.Random) -> int:
    """Return a number within the bounds of its type, often one of them; the bounds of the wire are those of 64 bits."""
    least = -(1 << 63) if kind.ge is None else kind.ge
    most = (1 << 64) - 1 if kind.le is None else kind.le
    number = rng.choice((least, most, *NUMBERS[:8], _number(rng)))
    return min(max(number, least), most)


def _number(rng: random.Random) -> int:
    return rng.choice(NUMBERS)


def _anything(rng: random.Random) -> Any:
    numbers = [_number(rng) for _ in range(rng.randrange(4))]
    return rng.choice((_number(rng), rng.choice(TEXTS), None, True, 1.5, numbers, [numbers], {"topic": "open"}))


# -- what an answer must not be ----------------------------------------------------------------------


def is_for(body: Body, who: str, hidden: frozenset[Any]) -> bool:
    """Return whether a request may succeed for `who`: "" for a stranger, else an ordinary user.

    `hidden` are the names and ids of topics that no ordinary user may see.
    """
    name = body["type"]
    if not who or name in PUBLIC:
        return name in PUBLIC
    if name not in FOR_USERS:
        return False
    if name == "explain_access":
        return bool(body["principal"] == f"user:{who}")
    return name in ABOUT_ALL or not _named_topics(body) & hidden


def _named_topics(body: Body) -> frozenset[Any]:
    topics = body.get("topics") or ()
    named = [one.get("topic") if isinstance(one, dict) else one for one in topics if isinstance(one, (dict, str))]
    return frozenset((*named, *(body[key] for key in ("topic", "topic_id") if isinstance(body.get(key), (str, int)))))


def encode_body(number: int, timeout_ms: int, body: Body) -> bytes:
    """Return the head of a request's frame."""
    return msgspec.msgpack.encode((number, timeout_ms, body))
