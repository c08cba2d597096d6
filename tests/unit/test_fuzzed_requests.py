"""The wire's fuzzer knows every type of request: it sends all of them, most in a form that a node can read."""

from __future__ import annotations

import random

import pytest
from made_requests import FOR_USERS, KINDS, ROUGH, basic_pool, encode_body, is_for, make_body

from quiver.access.rules import RULES
from quiver.wire.envelope import decode_request
from quiver.wire.frames import Frame, FrameKind

POOL = basic_pool({"open": 1, "hidden": 2})
HIDDEN = frozenset(("hidden", 2))


def test_every_type_with_a_rule_is_fuzzed() -> None:
    assert set(KINDS.values()) == set(RULES)
    assert KINDS.keys() >= FOR_USERS | ROUGH


@pytest.mark.parametrize("name", KINDS)
def test_most_made_up_requests_can_be_read(name: str) -> None:
    read = 0
    for seed in range(100):
        head = encode_body(1, 0, make_body(name, POOL, random.Random(seed)))
        incoming = decode_request(Frame(FrameKind.REQUEST, memoryview(head), memoryview(b"")))
        read += isinstance(incoming.request, KINDS[name])
    assert read > 60


def test_success_is_for_whom_the_types_and_topics_say() -> None:
    assert is_for({"type": "authenticate"}, "", HIDDEN)
    assert not is_for({"type": "fetch", "topic_id": 1}, "", HIDDEN)
    assert is_for({"type": "fetch", "topic_id": 1}, "mallory", HIDDEN)
    assert not is_for({"type": "fetch", "topic_id": 2}, "mallory", HIDDEN)
    assert not is_for({"type": "register_consumer", "topics": [{"topic": "hidden"}]}, "mallory", HIDDEN)
    assert not is_for({"type": "join_group", "topics": ["hidden"]}, "mallory", HIDDEN)
    assert not is_for({"type": "delete_topic", "topic": "open"}, "mallory", HIDDEN)
    assert not is_for({"type": "explain_access", "principal": "user:trent"}, "mallory", HIDDEN)
