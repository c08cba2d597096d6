"""Answers to those who wait, and to those who have stopped waiting."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from quiver.errors import NotLeaderError, OutcomeUnknownError, UnavailableError
from quiver.metrics import Histogram
from quiver.model import Index
from quiver.replication.pending import PendingProposals, Proposal
from quiver.tasks import SharedOutcome

Answer = Callable[[PendingProposals, Proposal], None]
ANSWERS: dict[str, Answer] = {
    "refused": lambda _, proposal: proposal.refuse(UnavailableError("not done")),
    "lost": lambda waiters, _: waiters.lose(Index(0)),
    "abandoned": lambda waiters, _: waiters.abandon(),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_error_that_nobody_waits_for_is_nobody_s_mistake(answer: Answer) -> None:
    """A client that goes away takes its call with it: its outcome must not be logged as a forgotten error."""
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        waiters, proposal = PendingProposals(Histogram()), Proposal([], SharedOutcome())
        proposal.end_index = Index(5)
        waiters.add_proposal(proposal)
        waiters.add_read(1, loop.create_future())
        waiters.add_read(2, loop.create_future())
        waiters.confirm_read(2, Index(9))
        call = loop.create_task(_wait(proposal))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        answer(waiters, proposal)
        waiters.abandon()

    asyncio.run(main())
    gc.collect()
    assert complaints == []


async def _wait(proposal: Proposal) -> None:
    await proposal.done


def test_those_who_wait_are_told() -> None:
    async def main() -> list[object]:
        loop = asyncio.get_running_loop()
        waiters, proposal = PendingProposals(Histogram()), Proposal([], SharedOutcome())
        proposal.end_index = Index(5)
        waiters.add_proposal(proposal)
        read: asyncio.Future[Index] = loop.create_future()
        waiters.add_read(1, read)
        waiters.abandon()
        return [type(error) for error in await asyncio.gather(proposal.done, read, return_exceptions=True)]

    assert asyncio.run(main()) == [OutcomeUnknownError, NotLeaderError]
