"""Rates, quotas and turns: nobody gets more than allowed, and nobody who keeps to it waits for others."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import OverloadedError
from quiver.security import ANONYMOUS, Principal, PrincipalKind
from quiver.security.identity import ConnectionIdentity
from quiver.security.limits import QuotaLimits as Limits
from quiver.security.limits import QuotaTable, is_share_used
from quiver.security.quotas import ACCOUNTS_MAX, QUOTA_EXCEEDED, FairQueue, Quotas, TokenBucket, Use

ALICE = Principal(PrincipalKind.USER, "alice")
BOB = Principal(PrincipalKind.USER, "bob")
T = TypeVar("T")
STEPS = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 30)), max_size=60)


def test_one_principal_gets_an_eighth_once_half_is_used() -> None:
    assert not is_share_used(own=499, used=499, most=1_000)
    assert is_share_used(own=500, used=500, most=1_000)
    assert not is_share_used(own=124, used=999, most=1_000)
    assert is_share_used(own=125, used=999, most=1_000)
    assert is_share_used(own=0, used=1_000, most=1_000)


def quotas(limits: Limits, topic_limits: Limits | None = None) -> Quotas:
    return Quotas(limits, topic_limits)


@given(st.integers(1, 50), STEPS)
def test_bucket_never_grants_more_than_its_rate_and_a_burst(amount: int, steps: list[tuple[int, int]]) -> None:
    bucket, now_ms, granted, largest = TokenBucket(amount, now_ms=0), 0, 0, 0
    for passed_ms, wanted in steps:
        now_ms += passed_ms
        if not bucket.wait_ms(wanted, now_ms):
            bucket.take(wanted, now_ms)
            granted += wanted
            largest = max(largest, wanted)
        assert granted <= amount + now_ms * amount / 1000 + largest


@given(st.integers(1, 50), STEPS)
def test_refused_amount_is_granted_after_the_time_that_was_told(amount: int, steps: list[tuple[int, int]]) -> None:
    bucket, now_ms = TokenBucket(amount, now_ms=0), 0.0
    for passed_ms, wanted in steps:
        now_ms += passed_ms
        waits_ms = bucket.wait_ms(wanted, now_ms)
        if waits_ms:
            assert bucket.wait_ms(wanted, now_ms + waits_ms * 0.9), "not earlier"
            now_ms += waits_ms
            assert bucket.wait_ms(wanted, now_ms + 0.001) == 0
        bucket.take(wanted, now_ms + 0.001)


def test_time_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(1, now_ms=1000)
    bucket.take(1, 1000)
    assert bucket.wait_ms(1, 0) > 0
    assert bucket.wait_ms(1, 1999) > 0
    assert bucket.wait_ms(1, 2000) == 0


@pytest.mark.parametrize(
    ("limits", "use"),
    [
        (Limits(requests_per_second=3), Use()),
        (Limits(mutations_per_second=3), Use(is_mutation=True)),
        (Limits(creations_per_minute=3), Use(is_creation=True)),
        (Limits(bytes_in_per_second=3_000), Use(bytes_in=1_000)),
    ],
)
def test_quota_is_per_principal(limits: Limits, use: Use) -> None:
    book = quotas(limits)
    for _ in range(3):
        assert book.admit(ALICE, use, 0) is None
    error = book.admit(ALICE, use, 0)
    assert isinstance(error, OverloadedError)
    assert error.code == QUOTA_EXCEEDED
    assert error.retry_after_ms
    assert "user:alice" in error.message
    assert book.admit(BOB, use, 0) is None
    assert book.admit(ALICE, use, error.retry_after_ms) is None


def test_refusal_takes_nothing() -> None:
    book = quotas(Limits(requests_per_second=2, bytes_in_per_second=1000))
    assert book.admit(ALICE, Use(bytes_in=1000), 0) is None
    for _ in range(10):
        assert book.admit(ALICE, Use(bytes_in=1000), 0) is not None
    assert book.admit(ALICE, Use(), 0) is None, "the refused ones did not count as requests"


def test_reads_are_no_mutations() -> None:
    book = quotas(Limits(mutations_per_second=1))
    for _ in range(10):
        assert book.admit(ALICE, Use(), 0) is None


def test_answers_are_paid_for_by_the_next_request() -> None:
    book = quotas(Limits(bytes_out_per_second=1000), Limits(bytes_out_per_second=10_000))
    assert book.admit(ALICE, Use(), 0) is None
    book.charge(ALICE, "logs", 3000, 0)
    error = book.admit(ALICE, Use(), 0)
    assert error is not None
    assert error.retry_after_ms is not None
    assert 1900 <= error.retry_after_ms <= 2100
    assert book.admit_topic("logs", Use(), 0) is None


def test_bodies_without_a_length_are_paid_for_by_the_next_request() -> None:
    book = quotas(Limits(bytes_in_per_second=1000))
    assert book.admit(ALICE, Use(), 0) is None
    book.charge_in(ALICE, 3000, 0)
    refused = book.admit(ALICE, Use(), 0)
    assert refused is not None
    assert book.admit(ALICE, Use(), refused.retry_after_ms or 0) is None


def test_topics_have_limits_of_their_own() -> None:
    book = quotas(Limits(), Limits(requests_per_second=1))
    assert book.admit_topic("noisy", Use(), 0) is None
    assert book.admit_topic("noisy", Use(), 0) is not None
    assert book.admit_topic("quiet", Use(), 0) is None


def test_waiting_requests_are_counted_and_given_back() -> None:
    book = quotas(Limits(long_polls_max=2))
    assert book.begin_long_poll(ALICE, 0) is None
    assert book.begin_long_poll(ALICE, 0) is None
    assert book.begin_long_poll(ALICE, 0) is not None
    assert book.begin_long_poll(BOB, 0) is None
    book.end_long_poll(ALICE)
    assert book.begin_long_poll(ALICE, 0) is None


def test_principals_that_are_remembered_are_bounded_and_the_waiting_ones_are_kept() -> None:
    book = quotas(Limits(long_polls_max=1))
    book.begin_long_poll(ALICE, 0)
    for number in range(ACCOUNTS_MAX + 5):
        book.admit(Principal(PrincipalKind.USER, str(number)), Use(), 0)
    assert len(book._principals) <= ACCOUNTS_MAX
    assert book.begin_long_poll(ALICE, 0) is not None


def test_connections_are_counted_until_they_end() -> None:
    book = quotas(Limits(connections_max=2))
    first, second, third = (ConnectionIdentity(ALICE) for _ in range(3))
    assert [book.admit_connection(one, 0) for one in (first, second, first, second)] == [None] * 4
    refused = book.admit_connection(third, 0)
    assert refused is not None
    assert "connections_max" in refused.message
    assert "administrator" in refused.message
    assert book.refusals == {"connections_max": 1}
    assert book.admit_connection(ConnectionIdentity(BOB), 0) is None
    first.is_open = False
    assert book.admit_connection(third, 0) is None


def test_connection_that_authenticates_counts_for_its_new_principal() -> None:
    book = quotas(Limits(connections_max=1))
    connection = ConnectionIdentity()
    assert book.admit_connection(connection, 0) is None
    connection.principal = ALICE
    assert book.admit_connection(connection, 0) is None
    assert book.admit_connection(ConnectionIdentity(), 0) is None


# -- limits of the cluster ---------------------------------------------------------------------------


def test_limits_of_the_cluster_come_before_those_of_the_node() -> None:
    rows = {"default": Limits(requests_per_second=2), "user:alice": Limits(requests_per_second=0)}
    book = Quotas(Limits(requests_per_second=1, mutations_per_second=1), table=lambda: QuotaTable(rows, {}))
    assert [book.admit(BOB, Use(), 0) is None for _ in range(3)] == [True, True, False]
    assert all(book.admit(ALICE, Use(), 0) is None for _ in range(10))
    assert [book.admit(ALICE, Use(is_mutation=True), 0) is None for _ in range(2)] == [True, False]


def test_user_has_the_highest_limit_of_its_roles() -> None:
    rows = {"role:a": Limits(topics_max=1), "role:b": Limits(topics_max=5), "default": Limits(topics_max=9)}
    table = QuotaTable(rows, {"alice": ["a", "b"], "bob": ["a"]})
    assert table.limits_of(ALICE, Limits()).topics_max == 5
    assert table.limits_of(BOB, Limits()).topics_max == 1
    assert table.limits_of(ANONYMOUS, Limits()).topics_max == 9
    rows["role:a"] = Limits(topics_max=0)
    assert table.limits_of(ALICE, Limits()).topics_max == 0, "no limit is the highest"


def test_topic_has_its_own_limit_or_that_of_all_topics() -> None:
    rows = {
        "topic:*": Limits(requests_per_second=2, bytes_in_per_second=7),
        "topic:logs": Limits(requests_per_second=3),
    }
    limits = QuotaTable(rows, {}).topic_limits_of("logs", Limits(bytes_out_per_second=1))
    assert limits == Limits(requests_per_second=3, bytes_in_per_second=7, bytes_out_per_second=1)


def test_weights_are_found_like_limits_and_are_one_otherwise() -> None:
    rows = {
        "user:alice": Limits(weight=5),
        "role:a": Limits(weight=2),
        "role:b": Limits(weight=3),
        "default": Limits(requests_per_second=9),
        "topic:*": Limits(weight=4),
        "topic:logs": Limits(weight=7),
    }
    book = Quotas(table=lambda: QuotaTable(rows, {"alice": ["a"], "bob": ["a", "b"]}))
    assert [book.weight_of(name) for name in ("user:alice", "user:bob", "user:eve", "anonymous")] == [5, 3, 1, 1]
    assert [book.topic_weight_of(topic) for topic in ("logs", "other")] == [7, 4]
    assert Quotas().weight_of("user:alice") == Quotas().topic_weight_of("logs") == 1


def test_changed_limit_applies_from_the_next_request_on() -> None:
    tables = [QuotaTable({"default": Limits(requests_per_second=1, mutations_per_second=1)}, {})]
    book = Quotas(table=lambda: tables[-1])
    mutation = Use(is_mutation=True)
    assert book.is_active
    assert book.admit(ALICE, mutation, 0) is None
    assert book.admit(ALICE, Use(), 0) is not None
    tables.append(QuotaTable({"default": Limits(requests_per_second=2, mutations_per_second=1)}, {}))
    assert book.admit(ALICE, Use(), 0) is None
    assert book.admit(ALICE, mutation, 0) is not None, "what was used before stays used"
    tables.append(QuotaTable({}, {}))
    assert not book.is_active
    assert book.admit(ALICE, mutation, 0) is None


def test_no_limits_are_none() -> None:
    assert Limits().is_unlimited
    book = quotas(Limits())
    for _ in range(1000):
        assert book.admit(ANONYMOUS, Use(bytes_in=10**9, is_mutation=True, is_creation=True), 0) is None


FLOWS = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"))


def served_next(queue: FairQueue[T]) -> T:
    found = queue.pop()
    assert found is not None
    return found


@given(st.lists(FLOWS | st.tuples(FLOWS, st.booleans()) | st.none(), max_size=100))
def test_topics_that_are_passed_over_keep_their_items_and_their_order(steps: list[Any]) -> None:
    queue: FairQueue[tuple[tuple[str, str], int]] = FairQueue()
    waiting: dict[tuple[str, str], list[int]] = {}
    blocked: set[tuple[str, str]] = set()
    for number, step in enumerate(steps):
        if step is None:
            found = queue.pop()
            ready = [flow for flow, numbers in waiting.items() if numbers and flow not in blocked]
            assert (found is None) == (not ready)
            if found is not None:
                assert found[0] in ready
                assert found[1] == waiting[found[0]].pop(0)
        elif isinstance(step[1], bool):
            flow, blocks = step
            (queue.block if blocks else queue.unblock)(*flow)
            (blocked.add if blocks else blocked.discard)(flow)
        else:
            principal, topic = step
            queue.push(principal, topic, (step, number))
            waiting.setdefault(step, []).append(number)
        assert len(queue) == sum(map(len, waiting.values()))
    for flow in blocked:
        queue.unblock(*flow)
    while queue:
        flow, number = served_next(queue)
        assert waiting[flow].pop(0) == number
    assert not any(waiting.values())


@given(st.lists(FLOWS | st.none(), max_size=100))
def test_queue_returns_every_item_once_and_keeps_the_order_of_a_topic(steps: list[tuple[str, str] | None]) -> None:
    queue: FairQueue[tuple[tuple[str, str], int]] = FairQueue()
    waiting: list[tuple[tuple[str, str], int]] = []
    served: list[tuple[tuple[str, str], int]] = []
    for number, flow in enumerate(steps):
        if flow is not None:
            queue.push(*flow, (flow, number))
            waiting.append((flow, number))
            assert queue.depth(*flow) == sum(one == flow for one, _ in waiting)
        elif waiting:
            served.append(served_next(queue))
            waiting.remove(served[-1])
        assert len(queue) == len(waiting)
        flows = {flow for flow, _ in waiting}
        for flow in flows:
            topics = [topic for principal, topic in flows if principal == flow[0]]
            assert queue.share(*flow) == 1 / (len({principal for principal, _ in flows}) * len(topics))
    served += [served_next(queue) for _ in range(len(queue))]
    assert sorted(number for _, number in served) == [n for n, flow in enumerate(steps) if flow is not None]
    for wanted in {flow for flow, _ in served}:
        numbers = [number for flow, number in served if flow == wanted]
        assert numbers == sorted(numbers)


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3), min_size=2), st.integers(1, 60))
def test_principals_get_equal_shares_however_many_topics_they_use(topics: dict[str, int], turns: int) -> None:
    queue: FairQueue[str] = FairQueue()
    for principal, count in topics.items():
        for number in range(count):
            for _ in range(100):
                queue.push(principal, str(number), principal)
    served = Counter(queue.pop() for _ in range(turns))
    assert max(served.values()) - min(served[principal] for principal in topics) <= 1


@given(st.integers(1, 60))
def test_topics_of_a_principal_get_equal_shares(turns: int) -> None:
    queue: FairQueue[str] = FairQueue()
    for topic, count in (("noisy", 500), ("quiet", 60), ("other", 60)):
        for _ in range(count):
            queue.push("a", topic, topic)
    served = Counter(queue.pop() for _ in range(turns))
    assert max(served.values()) - min(served[topic] for topic in ("noisy", "quiet", "other")) <= 1


def test_newcomer_is_served_at_once_whatever_waits() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.push("a", "noisy", f"noisy-{number}")
    for _ in range(500):
        queue.pop()
    queue.push("a", "quiet", "quiet")
    assert "quiet" in (queue.pop(), queue.pop())


@pytest.mark.parametrize("flows", [(("alice", "a"), ("bob", "a")), (("alice", "a"), ("alice", "b"))])
def test_nobody_gains_by_asking_for_one_thing_at_a_time(flows: tuple[tuple[str, str], tuple[str, str]]) -> None:
    single, many = flows
    queue: FairQueue[tuple[str, str]] = FairQueue()
    for _ in range(20):
        queue.push(*many, many)
    served: list[tuple[str, str]] = []
    while len(served) < 20:
        if not queue.depth(*single):
            queue.push(*single, single)
        served.append(served_next(queue))
    assert served.count(many) == 10


@pytest.mark.parametrize("of", ["principal", "topic"])
def test_weight_is_a_multiple_of_the_share(of: str) -> None:
    def weight_of(name: str) -> float:
        return 3.0 if name == "a" else 1.0

    if of == "principal":
        queue: FairQueue[str] = FairQueue(weight_of=weight_of)
    else:
        queue = FairQueue(topic_weight_of=weight_of)
    for name in "ab":
        for _ in range(100):
            principal, topic = (name, "t") if of == "principal" else ("p", name)
            queue.push(principal, topic, name)
    served = Counter(queue.pop() for _ in range(80))
    assert abs(served["a"] - 60) <= 1
