"""`quiver node`: run one node in the foreground until a signal stops it, or its disk fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from contextlib import suppress

import click

from quiver.cli.config import settings_from, settings_options
from quiver.config import Settings
from quiver.environment import SystemEnvironment
from quiver.errors import ConfigError, QuiverError, StorageError
from quiver.logs import configure_logging
from quiver.node import Node
from quiver.storage import DirectoryLock
from quiver.tasks import new_event_loop

logger = logging.getLogger(__name__)


@click.command(
    short_help="Run one node.",
    epilog="Example: quiver node --id 1 --data ./node-1 --join 1@127.0.0.1:9002",
)
@click.option("--with-parent", is_flag=True, hidden=True, help="Stop when standard input ends.")
@settings_options
def node(*, with_parent: bool, **options: str | None) -> None:
    """Run one node in the foreground: manager, broker, gateway, or any of them.

    The first start forms a cluster of the managers that --join names, or joins an existing one; later starts resume
    from the data directory. Prints a line that begins with "ready" once the node serves. SIGTERM and Ctrl-C transfer
    leadership to other nodes before the node stops.
    """
    settings = settings_from(options)
    if not settings.node.id:
        raise ConfigError("the node has no id: give --id, a number from 1 that is unique in the cluster")
    configure_logging(settings.logging, sys.stderr)
    _raise_file_limit()
    with DirectoryLock(settings.node.data):
        # Not `except*`: before Python 3.11.4, it wraps what is raised inside it into a group.
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_run(settings, with_parent=with_parent))
        except Exception as error:
            if (known := _find_quiver_error(error)) is not None:
                raise known from None  # one error ends several tasks, which report it as a group
            logger.exception("node crashed")
            raise


def _raise_file_limit() -> None:
    """Raise the process's soft limit of open files and connections to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS refuses an unlimited value; the soft limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tune_garbage_collector() -> None:
    """Exempt the objects of startup from garbage collection, and collect younger ones less often.

    With the defaults, the collector takes a fifth of a busy node's time, and frees next to nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)


def _find_quiver_error(error: BaseException) -> QuiverError | None:
    """Return the first error of ours inside nested groups; None if another exception is among them."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, QuiverError) else None
    found = [_find_quiver_error(inner) for inner in error.exceptions]
    return None if None in found else found[0]


async def _run(settings: Settings, *, with_parent: bool) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    if with_parent:
        loop.add_reader(sys.stdin.fileno(), _watch_parent, stopped)
    async with SystemEnvironment(settings) as environment, Node(settings, environment) as node:
        failure = await _serve(node, stopped)
    if failure is not None:
        raise failure


async def _serve(node: Node, stopped: asyncio.Event) -> StorageError | None:
    """Wait until a signal stops the node or its storage fails; return the failure, if any."""
    async with asyncio.TaskGroup() as tasks:
        announcing = tasks.create_task(_announce_ready(node))
        failing = tasks.create_task(node.wait_failed())
        stopping = tasks.create_task(stopped.wait())
        await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
        failure = failing.result() if failing.done() else None
        for task in (announcing, failing, stopping):
            task.cancel()
    return failure


async def _announce_ready(node: Node) -> None:
    await node.wait_ready()
    _tune_garbage_collector()
    click.echo(f"ready node={node.id} wire={node.wire_address} http={node.http_address or '-'} pid={os.getpid()}")
    sys.stdout.flush()


def _watch_parent(stopped: asyncio.Event) -> None:
    with suppress(BlockingIOError):
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            stopped.set()
