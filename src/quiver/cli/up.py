"""`quiver up`: run a whole cluster on this machine, as child processes in the foreground.

Each node is an ordinary `quiver node` with its own ports. The children stay in this process's group, and each has a
pipe from it as standard input: when this process dies in any way, the pipes close and the nodes stop. A node that dies
is reported and not restarted, so that its operator sees how the cluster copes.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import click

from quiver.cli.config import PRIVATE_UMASK, insecure_option, parse_settings
from quiver.cli.output import UNAVAILABLE, print_table
from quiver.config import decide_mode, redact_url
from quiver.errors import QuiverError, UnavailableError
from quiver.security.bootstrap import initialize, node_directory
from quiver.security.files import CA_NAME, TOKEN_NAME

READY_TIMEOUT_S = 60
STOP_TIMEOUT_S = 20
"""How long nodes may take to transfer leadership and close before they are killed."""
_LOG_LINES = 15
_MANAGERS = (5, 3, 1)
"""Possible numbers of managers: odd, so that a majority survives the most failures."""


@dataclass(frozen=True)
class NodePlan:
    """One node to run."""

    node: int
    roles: str
    http: str
    wire: str
    directory: str
    arguments: tuple[str, ...]

    @property
    def url(self) -> str:
        """Return the address at which the node serves HTTP, with the scheme that its settings choose."""
        settings = parse_settings(self.arguments)
        return f"{'https' if settings.gateway.serves_https(settings.tls) else 'http'}://{self.http}"

    @property
    def log_path(self) -> str:
        """Return the path of the node's log file."""
        return f"{self.directory}/node.log"

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command that starts the node."""
        return (sys.executable, "-m", "quiver", "node", *self.arguments)

    @property
    def shown_command(self) -> str:
        """Return the command as a line to copy; passwords, which only URLs contain, are hidden."""
        return shlex.join(("quiver", "node", *(redact_url(one) if "://" in one else one for one in self.arguments)))


@click.command(
    short_help="Run a cluster on this machine.",
    context_settings={"ignore_unknown_options": True},
    epilog="Example: quiver up --nodes 3 --data ./quiver-data",
)
@click.option("--nodes", type=click.IntRange(1, 50), default=3, show_default=True, help="Number of nodes to run.")
@click.option(
    "--data", default="./quiver-data", show_default=True, help="Directory that holds the nodes' data directories."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--http-port", type=click.IntRange(1, 65000), default=8002, show_default=True, help="HTTP port of the first node."
)
@click.option(
    "--wire-port", type=click.IntRange(1, 65000), default=9002, show_default=True, help="Wire port of the first node."
)
@click.option(
    "--secure",
    is_flag=True,
    help="Run it locked down: certificates, TLS on every port, an administrator's token; all in DATA/security.",
)
@insecure_option
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def up(
    context: click.Context,
    *,
    nodes: int,
    data: str,
    host: str,
    http_port: int,
    wire_port: int,
    secure: bool,
    insecure: bool,
    settings: tuple[str, ...],
) -> None:
    """Run a cluster on this machine until Ctrl-C or SIGTERM; the next run on the same directory resumes it.

    SETTINGS, after a --, are passed to every node unchanged: quiver up -- --log-durability interval
    """
    os.umask(PRIVATE_UMASK)
    if secure and insecure:
        raise click.UsageError("--secure and --insecure exclude each other", context)
    if insecure:
        settings = (*settings, "--security-mode", "insecure")
    directory = f"{os.path.abspath(data)}/security" if secure else ""
    plans = plan_nodes(
        nodes, data=data, host=host, http_port=http_port, wire_port=wire_port, settings=settings, security=directory
    )
    if secure:
        initialize(directory, {plan.node: [host] for plan in plans})
    decide_mode(parse_settings(plans[0].arguments))  # here, where its sentence is not lost in a log
    context.exit(asyncio.run(_run(plans, security=directory)))


def plan_nodes(
    nodes: int,
    *,
    data: str,
    host: str,
    http_port: int,
    wire_port: int,
    settings: tuple[str, ...] = (),
    security: str = "",
) -> list[NodePlan]:
    """Return the nodes to run: the first one, three or five are managers; all are brokers and gateways."""
    managers = next(count for count in _MANAGERS if count <= nodes)
    join = ",".join(f"{at + 1}@{host}:{wire_port + at}" for at in range(managers))
    plans = []
    for at in range(nodes):
        roles = "manager,broker,gateway" if at < managers else "broker,gateway"
        http, wire = f"{host}:{http_port + at}", f"{host}:{wire_port + at}"
        directory = f"{data}/node-{at + 1}"
        arguments = ["--id", str(at + 1), "--roles", roles, "--data", directory, "--http", http, "--wire", wire]
        if security:
            arguments += ["--security-mode", "secure", "--security-directory", node_directory(security, at + 1)]
        plans.append(NodePlan(at + 1, roles, http, wire, directory, (*arguments, "--join", join, *settings)))
    return plans


class _Child:
    """A node's process."""

    def __init__(self, plan: NodePlan, process: asyncio.subprocess.Process) -> None:
        self.plan = plan
        self.process = process

    @classmethod
    async def start(cls, plan: NodePlan) -> _Child:
        with _open_log(plan) as log:
            process = await asyncio.create_subprocess_exec(
                *plan.command,
                "--with-parent",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        return cls(plan, process)

    async def wait_ready(self) -> None:
        """Return when the node prints that it is ready.

        Raises:
            UnavailableError: the node ended first.
        """
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line.startswith(b"ready"):
                return
        raise _not_ready(self.plan)

    async def watch(self) -> None:
        """Report the end of the node."""
        code = await self.process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        again = self.plan.shown_command
        click.echo(f"node {self.plan.node} (pid {self.process.pid}) {how}; to start it again: {again}")

    def signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(
                    self.process.pid, number
                )  # `send_signal` may poll and consume the exit status that `wait` needs


async def _run(plans: list[NodePlan], *, security: str = "") -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    children = [await _Child.start(plan) for plan in plans]
    stopping = asyncio.ensure_future(stopped.wait())
    try:
        await _wait_all_ready(children, stopping)
        if stopped.is_set():
            return 0
        _print_nodes(children, security=security)
        return await _watch(children, stopping)
    finally:
        stopping.cancel()
        await _stop(children)


async def _wait_all_ready(children: list[_Child], stopping: asyncio.Future[Any]) -> None:
    """Return when every node is ready, or when a signal asks to stop.

    Raises:
        UnavailableError: a node ended or takes too long; the message shows the end of its log.
    """
    ready = asyncio.gather(*(child.wait_ready() for child in children))
    await asyncio.wait((ready, stopping), timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        ready.result()
        return
    ready.cancel()
    await asyncio.wait((ready,))
    with suppress(asyncio.CancelledError, QuiverError):
        ready.result()
    if not stopping.done():
        raise _not_ready(children[0].plan)


def _not_ready(plan: NodePlan) -> UnavailableError:
    sentence = f"node {plan.node} did not become ready; the end of {plan.log_path}:"
    return UnavailableError(f"{sentence}\n{_tail(plan.log_path)}", code="not_started")


def _print_nodes(children: list[_Child], *, security: str) -> None:
    rows = [
        (
            child.plan.node,
            child.process.pid,
            child.plan.roles,
            child.plan.url,
            child.plan.wire,
            child.plan.directory,
        )
        for child in children
    ]
    print_table(("node", "pid", "roles", "http", "wire", "data"), rows)
    if security:
        click.echo("clients need the address, the authority and the administrator's token:")
        click.echo(f"export QUIVER_URL={children[0].plan.url}")
        click.echo(f"export QUIVER_CA_FILE={shlex.quote(f'{security}/{CA_NAME}')}")
        click.echo(f"export QUIVER_TOKEN_FILE={shlex.quote(f'{security}/{TOKEN_NAME}')}")
    click.echo(f"console: {children[0].plan.url}/console")
    click.echo(f"ready: {children[0].plan.url} (Ctrl-C stops all)")
    sys.stdout.flush()


async def _watch(children: list[_Child], stopping: asyncio.Future[Any]) -> int:
    """Wait until a signal asks to stop, or until no node is left; return the exit code."""
    watching = asyncio.gather(*(child.watch() for child in children))
    await asyncio.wait((watching, stopping), return_when=asyncio.FIRST_COMPLETED)
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    return 0 if stopping.done() else UNAVAILABLE


async def _stop(children: list[_Child]) -> None:
    for child in children:
        child.signal(signal.SIGTERM)
    ended = asyncio.gather(*(child.process.wait() for child in children))
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(ended), STOP_TIMEOUT_S)
    if not ended.done():
        for child in children:
            child.signal(signal.SIGKILL)
        await ended


def _open_log(plan: NodePlan) -> BinaryIO:
    os.makedirs(plan.directory, exist_ok=True)
    return open(plan.log_path, "ab")


def _tail(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-_LOG_LINES:]).rstrip()
