"""`quiver node`: run one node in the foreground until a signal stops it, or its disk fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import threading
from contextlib import AbstractContextManager, nullcontext, suppress

import click

from quiver.cli.config import PRIVATE_UMASK, insecure_option, settings_from, settings_options, sources_from
from quiver.cli.output import report_error
from quiver.config import Settings, decide_mode
from quiver.config.descriptors import fit_to_descriptors
from quiver.environment import SystemEnvironment
from quiver.errors import ConfigError, QuiverError, StorageError
from quiver.faults import NodeFault, as_exit, find_cause
from quiver.logs import configure_logging, facts
from quiver.node import Node
from quiver.storage import DirectoryLock
from quiver.tasks import new_event_loop
from quiver.tracing import exporting

logger = logging.getLogger(__name__)

CLOSE_S_MAX = 10.0
"""How long a node may take to close after a fault, before the process ends anyway."""


@click.command(
    short_help="Run one node.",
    epilog="Example: quiver node --id 1 --data ./node-1 --join 1@127.0.0.1:9002",
)
@click.option("--with-parent", is_flag=True, hidden=True, help="Stop when standard input ends.")
@insecure_option
@settings_options
def node(*, with_parent: bool, insecure: bool, **options: str | None) -> None:
    """Run one node in the foreground: manager, broker, gateway, or any of them.

    The first start forms a cluster of the managers that --join names, or joins an existing one; later starts resume
    from the data directory. Prints a line that begins with "ready" once the node serves. SIGTERM and Ctrl-C transfer
    leadership to other nodes before the node stops.
    """
    os.umask(PRIVATE_UMASK)
    if insecure:
        options["security_mode"] = "insecure"
    settings = settings_from(options)
    decide_mode(settings)  # before anything is opened
    if not settings.node.id:
        raise ConfigError("the node has no id: give --id, a number from 1 that is unique in the cluster")
    configure_logging(settings.logging, sys.stderr)
    _raise_file_limit()
    settings = _fit_to_file_limit(settings)
    with DirectoryLock(settings.node.data), _exporting_traces(settings):
        # Not `except*`: before Python 3.11.4, it wraps what is raised inside it into a group.
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_run(settings, sources_from(options), with_parent=with_parent))
        except Exception as error:
            cause = find_cause(error)  # one error ends several tasks, which report it as a group
            if not isinstance(cause, QuiverError | OSError):
                logger.critical("node crashed", exc_info=error)
            raise cause from None


def _exporting_traces(settings: Settings) -> AbstractContextManager[None]:
    traces = settings.tracing
    if not traces.is_enabled:
        return nullcontext()
    return exporting(endpoint=traces.endpoint, node=settings.node.id, samples_per_million=traces.samples_per_million)


def _raise_file_limit() -> None:
    """Raise the process's soft limit of open files and connections to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS refuses an unlimited value; the soft limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _fit_to_file_limit(settings: Settings) -> Settings:
    """Reduce the limits of connections and replicas to what the limit of open files allows, and say so."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fitted = fit_to_descriptors(settings, limit)
    logger.info(
        "limits of open files",
        extra=facts(
            limit=limit,
            client_connections_max=fitted.wire.client_connections_max,
            http_connections_max=fitted.gateway.connections_max,
            replicas_per_broker_max=fitted.manager.replicas_per_broker_max,
        ),
    )
    return fitted


def _tune_garbage_collector() -> None:
    """Exempt the objects of startup from garbage collection, and collect younger ones less often.

    With the defaults, the collector takes a fifth of a busy node's time, and frees next to nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)


async def _run(settings: Settings, sources: dict[str, str], *, with_parent: bool) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    if with_parent:
        loop.add_reader(sys.stdin.fileno(), _watch_parent, stopped)
    async with SystemEnvironment(settings) as environment:
        if settings.tls.is_enabled:  # otherwise it ends the process, as when a terminal closes
            loop.add_signal_handler(signal.SIGHUP, environment.certificates.reload_now)
        node, is_running = Node(settings, environment), False
        node.setting_sources = sources
        try:
            loop.set_exception_handler(lambda _, context: node.handle_escaped(context))
            async with node:
                is_running = True
                await _serve_until(node, stopped)
        except Exception as error:  # noqa: BLE001 - raised again, as what the node ends with
            raise as_exit(error) if is_running else find_cause(error) from None
    if node.failure is not None:
        raise node.failure


async def _serve_until(node: Node, stopped: asyncio.Event) -> None:
    """Serve until a signal stops the node, its storage fails or a fault ends it; raise the fault."""
    try:
        failure = await _serve(node, stopped)
    except asyncio.CancelledError:  # a part of the node has crashed; its error appears when the node has closed
        _limit_closing(NodeFault("a part of the node crashed, and the node did not close in time; see the log"))
        raise
    if failure is not None and not isinstance(failure, StorageError):
        _limit_closing(failure)
        raise failure  # so that the node closes without handing anything over


def _limit_closing(error: Exception) -> None:
    """End the process soon after a fault, even if closing the node hangs: its state can no longer be trusted."""
    timer = threading.Timer(CLOSE_S_MAX, _exit_now, (error,))
    timer.daemon = True
    timer.start()


def _exit_now(error: BaseException) -> None:
    code = report_error(error)
    sys.stderr.flush()
    os._exit(code)


async def _serve(node: Node, stopped: asyncio.Event) -> Exception | None:
    """Wait until a signal stops the node or it must end; return why, if it is no signal."""
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
