"""The fault policy: what ends a node, what is only logged, and which loops start again."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from quiver.errors import ConfigError, OutOfRangeError, RequestError, StorageError, UnavailableError
from quiver.faults import NodeFault, as_exit, describe_fault, find_cause, judge, supervise
from quiver.testing import SimulatedLoop


@pytest.mark.parametrize(
    "context",
    [
        {"message": "callback", "exception": KeyError("x")},
        {"message": "callback", "exception": StorageError("disk")},
    ],
)
def test_error_of_the_nodes_own_code_ends_the_node(context: dict[str, object]) -> None:
    assert judge(context) is context["exception"]


@pytest.mark.parametrize(
    "context",
    [
        {"message": "callback", "exception": UnavailableError("retry")},
        {"message": "accept", "exception": OSError("too many open files")},
        {"message": "data_received", "exception": KeyError("x"), "transport": object()},
        {"message": "slow callback"},
    ],
)
def test_error_of_a_connection_or_without_a_caller_is_only_logged(context: dict[str, object]) -> None:
    assert judge(context) is None


def test_node_ends_with_what_says_most() -> None:
    defect = KeyError("x")
    assert find_cause(ExceptionGroup("", [StorageError("disk"), ExceptionGroup("", [defect])])) is defect
    assert isinstance(as_exit(StorageError("disk")), StorageError)
    assert isinstance(as_exit(ConfigError("bad")), ConfigError)
    fault = as_exit(ExceptionGroup("", [OutOfRangeError("not done: too many")]))
    assert isinstance(fault, NodeFault)
    assert "not done: too many" in str(fault)
    assert describe_fault(RequestError("no\nway")) == "bad_request: no way"


def test_loop_that_a_refusal_of_a_peer_ends_starts_again_after_growing_pauses() -> None:
    begun: list[float] = []

    async def main() -> None:
        async def run() -> None:
            begun.append(loop.time())
            if len(begun) < 4:
                raise ExceptionGroup("tasks", [OutOfRangeError("not done: no")])

        await supervise("test", run)

    loop = SimulatedLoop(random.Random(1))
    loop.run_until_complete(main())
    loop.close()
    assert [round(after - before, 3) for before, after in pairwise(begun)] == [0.1, 0.2, 0.4]


@pytest.mark.parametrize("error", [StorageError("disk"), KeyError("x")])
def test_loop_does_not_survive_a_failed_disk_or_a_defect(error: Exception) -> None:
    async def main() -> None:
        async def run() -> None:
            raise error

        await supervise("test", run)

    loop = SimulatedLoop(random.Random(1))
    with pytest.raises(type(error)):
        loop.run_until_complete(main())
    loop.close()


def test_cancelled_loop_ends() -> None:
    async def main() -> None:
        task = asyncio.get_running_loop().create_task(supervise("test", asyncio.Event().wait))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
