"""The tail cache against a plain list of batches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from log_world import control_batch, data_batch

from quiver.model import Index
from quiver.record import Batch
from quiver.storage.tail import BATCH_OVERHEAD_BYTES, TailBudget, TailCache

FIRST_INDEX = 7
BOUND_BYTES = 6 * (BATCH_OVERHEAD_BYTES + 150)

Step = tuple[str, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3)),
        st.tuples(st.just("evict"), st.integers(0, 40)),
        st.tuples(st.just("forget"), st.integers(0, 12)),
        st.tuples(st.just("truncate"), st.integers(0, 12)),
    ),
    max_size=60,
)


class Model:
    """Every batch ever added and not truncated, and how many of the oldest were dropped."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.end_index, self.end_offset = FIRST_INDEX, 0

    def add(self, records: int) -> Batch:
        index, offset = self.end_index, self.end_offset
        batch = (
            data_batch([b"v" * 20] * records, index=index, offset=offset)
            if records
            else control_batch(b"c", index=index, offset=offset)
        )
        self.batches.append(batch)
        self.end_index, self.end_offset = index + 1, offset + records
        return batch

    def truncate(self, count: int) -> int:
        """Forget up to `count` of the newest batches; return the end index then."""
        kept = self.batches[: max(0, len(self.batches) - count)]
        if len(kept) < len(self.batches):
            self.end_offset = self.batches[len(kept)].header.base_offset
        self.batches = kept
        self.end_index -= min(count, self.end_index - FIRST_INDEX)
        return self.end_index

    def evict(self, durable_end: int) -> None:
        while self.batches and self.cost() > BOUND_BYTES and self.batches[0].header.index < durable_end:
            del self.batches[0]

    def forget(self, count: int) -> None:
        del self.batches[:count]

    def cost(self) -> int:
        return sum(len(batch.data) + BATCH_OVERHEAD_BYTES for batch in self.batches)

    def take(self, end_index: int, bytes_max: int) -> list[Batch]:
        taken: list[Batch] = []
        for batch in self.batches:
            is_too_much = sum(len(other.data) for other in (*taken, batch)) > bytes_max
            if batch.header.index >= end_index or (taken and is_too_much):
                break
            taken.append(batch)
        return taken

    def index_of_offset(self, offset: int) -> int | None:
        return next(
            (b.header.index for b in self.batches if b.header.base_offset <= offset < b.header.end_offset), None
        )


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_the_window_is_what_a_plain_list_would_hold(steps: list[Step]) -> None:
    model, tail = Model(), TailCache(Index(FIRST_INDEX), bytes_max=BOUND_BYTES)
    for name, argument in steps:
        match name:
            case "add":
                tail.extend([model.add(argument)])
            case "evict":
                model.evict(FIRST_INDEX + argument)
                tail.evict(Index(FIRST_INDEX + argument))
            case "forget":
                model.forget(argument)
                tail.forget(Index(model.end_index - len(model.batches)))
            case _:
                tail.truncate(model.truncate(argument))
        check(tail, model)


def check(tail: TailCache, model: Model) -> None:
    first_index = model.end_index - len(model.batches)
    assert (tail.first_index, tail.end_index) == (first_index, model.end_index)
    assert tail.size_bytes == model.cost()
    for batch in model.batches:
        assert tail.get(batch.header.index) is batch
        assert tail.term_at(batch.header.index) == batch.header.term
    for offset in range(model.end_offset + 2):
        assert tail.index_of_offset(offset) == model.index_of_offset(offset)
    for end_index in range(first_index, model.end_index + 1):
        for bytes_max in (0, 300, 1_000_000):
            taken = tail.take(first_index, end_index=end_index, bytes_max=bytes_max)
            assert taken == model.take(end_index, bytes_max)


def test_evicted_slots_do_not_pile_up() -> None:
    tail = TailCache(Index(1), bytes_max=10_000)
    for index in range(1, 5001):
        tail.extend([data_batch([b"x"], index=index, offset=index - 1)])
        tail.evict(Index(index + 1))
        assert tail.size_bytes <= 10_000
    assert len(tail._batches) < 3000
    assert tail.end_index == 5001
    assert tail.get(5000).header.index == 5000
    assert tail.index_of_offset(4999) == 5000
    assert tail.index_of_offset(0) is None


def grow(tail: TailCache, count: int, *, durable: int | None = None) -> None:
    for _ in range(count):
        tail.extend([data_batch([b"x" * 400], index=tail.end_index, offset=tail.end_index - 1)])
    tail.evict(Index(tail.end_index if durable is None else durable))


def test_tails_of_several_logs_share_a_budget_and_the_oldest_goes_first() -> None:
    budget = TailBudget(25_000)
    first, second, third = (TailCache(Index(1), bytes_max=20_000, budget=budget) for _ in range(3))
    grow(first, 10)
    grow(second, 10)
    grow(first, 1)
    assert (len_of(first), len_of(second)) == (11, 10)
    grow(third, 5)
    assert (len_of(first), len_of(second), len_of(third)) == (11, 0, 5)
    assert second.end_index == second.first_index == 11
    assert budget.size_bytes == first.size_bytes + third.size_bytes
    grow(second, 1)
    assert second.get(11).header.index == 11


def test_what_is_not_on_disk_is_kept_whatever_the_budget() -> None:
    budget = TailBudget(0)
    first, second = (TailCache(Index(1), bytes_max=20_000, budget=budget) for _ in range(2))
    grow(first, 5, durable=3)
    grow(second, 3)
    assert (first.first_index, first.end_index) == (3, 6)
    grow(first, 1)
    assert len_of(second) == 0


def test_what_replaces_a_cut_tail_is_kept_until_it_is_on_disk() -> None:
    budget = TailBudget(0)
    first, second = (TailCache(Index(1), bytes_max=20_000, budget=budget) for _ in range(2))
    grow(first, 5)
    first.truncate(3)
    first.extend([data_batch([b"y"], index=3, offset=2)])  # not on disk, although what it replaces was
    grow(second, 1)
    assert first.get(3).values() == [b"y"]


def test_closed_tail_is_counted_no_more() -> None:
    budget = TailBudget(1_000_000)
    tail = TailCache(Index(1), bytes_max=20_000, budget=budget)
    grow(tail, 5)
    assert budget.size_bytes == tail.size_bytes > 0
    tail.close()
    tail.close()
    assert budget.size_bytes == 0


def len_of(tail: TailCache) -> int:
    return tail.end_index - tail.first_index
