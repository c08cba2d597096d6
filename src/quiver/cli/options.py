"""Options, arguments and examples that commands share, and the connection to the cluster that they name.

`StartType` parses a start position as users write it: `earliest`, `latest`, an offset, a time, or an age.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

import quiver
from quiver.contexts import DEFAULT_URL, resolve
from quiver.errors import QuiverError, RequestError

if TYPE_CHECKING:
    from quiver.client.consumer_core import SeekTarget
    from quiver.security.key_ring import KeyRing

COMPLETION_TIMEOUT_S = 2.0
"""How long the completion of a topic's name may keep a shell waiting for the cluster."""
TIME_HELP = "a time (2026-01-31T12:00; UTC unless it has a zone), or an age (15m)"
START_HELP = f"earliest, latest, an offset, {TIME_HELP}"

URL_HELP = (
    "Any node of the cluster, or several separated by commas: HTTP or wire addresses.  "
    f"[default: $QUIVER_URL, else the context in use, else {DEFAULT_URL}]"
)

_META = "quiver.cluster"
"""Key of the options that name a cluster, in the running command's context."""
CREDENTIAL_HELP = "File with the token of this client, mode 0600.  [default: $QUIVER_TOKEN_FILE, else the context's]"
USER_HELP = "User that proves a password, instead of a token.  [default: $QUIVER_USER, else the context's]"
USER_FILE_HELP = "File with the user's password, mode 0600.  [default: $QUIVER_PASSWORD_FILE, else the context's]"
_AGE = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

Command = TypeVar("Command", bound=Callable[..., Any])


def examples(*commands: str) -> str:
    """Return a help epilog that shows commands as they are typed, one per line."""
    if len(commands) == 1:
        return f"Example: {commands[0]}"
    # `\b` tells click not to rewrap the lines that follow.
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def url_option(command: Command) -> Command:
    """Add to a command what names its cluster: `--url` or `--context`, the files of TLS and token, and `--timeout`."""
    options = (
        click.option("--url", default="", help=URL_HELP),
        _cluster_option("--context", metavar="NAME", help="Cluster that `quiver context add` stored."),
        _cluster_option("--tls", is_flag=True, help="Use TLS; implied by https:// and by each of the three files."),
        _cluster_option("--ca-file", metavar="FILE", help="CA certificates that verify the cluster's certificates."),
        _cluster_option("--certificate-file", metavar="FILE", help="Client certificate."),
        _cluster_option("--key-file", metavar="FILE", help="Private key of the client certificate."),
        _cluster_option("--token-file", metavar="FILE", help=CREDENTIAL_HELP),
        _cluster_option("--username", metavar="USER", help=USER_HELP),
        _cluster_option("--password-file", metavar="FILE", help=USER_FILE_HELP),
        refuse_secrets,
        _cluster_option(
            "--timeout",
            type=click.FloatRange(min=0.001, max=86_400.0),
            metavar="SECONDS",
            help="Longest time of a request to the cluster, all its attempts included.  [default: 30]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def refuse_secrets(command: Command) -> Command:
    """Make a command refuse `--token` and `--password`, with or without a value, with what to do instead."""
    for flag in ("--token", "--password"):
        command = click.option(
            flag, hidden=True, expose_value=False, is_flag=False, flag_value="", is_eager=True, callback=_refuse_secret
        )(command)
    return command


_REPLACE = {"token": "revoke it: `quiver token revoke`", "password": "change it: `quiver user password`"}
"""What to do about a secret that others may have seen."""


def _refuse_secret(context: click.Context, parameter: click.Parameter, value: object) -> None:
    if value is not None and not context.resilient_parsing:
        name = str(parameter.name)
        raise click.UsageError(
            f"a {name} is not passed on the command line, where every user of this machine sees it: write it to a "
            f"file, `chmod 600` it, and pass --{name}-file FILE or set QUIVER_{name.upper()}_FILE. If it was a real "
            f"one, {_REPLACE[name]}",
            context,
        )


def _cluster_option(flag: str, **attributes: Any) -> Callable[[Command], Command]:
    """Return an option whose value `connect` reads from the running command, which need not pass it on."""
    return click.option(flag, expose_value=False, callback=_remember, **attributes)


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    if value:
        # Not `--user`: that is what `quiver token list` asks about, and the argument of `quiver user`.
        name = "user" if parameter.name == "username" else parameter.name
        context.meta.setdefault(_META, {})[name] = value
    return value


def json_option(command: Command) -> Command:
    """Add `--json` to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def json_lines_option(command: Command) -> Command:
    """Add `--json` to a command that prints a stream."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")(command)


def partitions_option(command: Command) -> Command:
    """Add `--partition`, which may be repeated, to a command."""
    return click.option(
        "--partition",
        "partitions",
        type=click.IntRange(min=0),
        metavar="N",
        multiple=True,
        help="Only this partition; may be repeated.",
    )(command)


def topic_argument(command: Command) -> Command:
    """Add TOPIC, which shells complete with the names of existing topics, to a command."""
    return click.argument("topic", shell_complete=_complete_topic)(command)


def connect(url: str, **options: Any) -> quiver.Cluster:
    """Return a connection to the cluster that the running command's options name; use as ``with``."""
    return quiver.connect(*((url,) if url else ()), **_connection_options(options))


def connect_async(url: str, **options: Any) -> quiver.AsyncCluster:
    """Return the same as `connect` for asyncio; use as ``async with``."""
    return quiver.connect_async(*((url,) if url else ()), **_connection_options(options))


def find_ca_file(url: str) -> str:
    """Return the file with the authorities that the running command trusts.

    Raises:
        RequestError: none is named.
    """
    named = _connection_options({})
    given = {key: named[key] for key in ("context", "ca_file") if key in named}
    target = resolve(url or None, **given)
    if not target.ca_file:
        raise RequestError(
            "no certificate authority is named: pass --ca-file, or set QUIVER_CA_FILE", code="no_ca_file"
        )
    return target.ca_file


def _connection_options(options: dict[str, Any]) -> dict[str, Any]:
    running = click.get_current_context(silent=True)
    named = {} if running is None else running.meta.get(_META, {})
    return {"client_name": "quiver-cli", **named, **options}


def _complete_topic(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    url = context.params.get("url") or ""
    with suppress(QuiverError), context, connect(url, timeout=COMPLETION_TIMEOUT_S) as cluster:
        return [topic for topic in cluster.list_topics() if topic.startswith(incomplete)]
    return []


class Start(msgspec.Struct, frozen=True):
    """A start position in every partition: an offset or word, or else a time."""

    offset: SeekTarget | None = None
    timestamp: datetime | None = None


class StartType(click.ParamType[Start]):
    """Parse a `Start`."""

    name = "where"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002 - click's signature
        """Return the placeholder that the help shows."""
        return "WHERE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Start:
        """Return the start position that a word stands for; fail with a usage error if it stands for none."""
        if isinstance(value, Start):
            return value
        if value in ("earliest", "latest"):
            return Start(offset=value)
        if value.isascii() and value.isdigit():
            return Start(offset=int(value))
        try:
            return Start(timestamp=_parse_time(value))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is none of: {START_HELP}", param, ctx)


class TimeType(click.ParamType[datetime]):
    """Parse a time, or an age."""

    name = "when"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002 - click's signature
        """Return the placeholder that the help shows."""
        return "WHEN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return the time that a word stands for; fail with a usage error if it stands for none."""
        if isinstance(value, datetime):
            return value
        try:
            return _parse_time(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is none of: {TIME_HELP}", param, ctx)


def _parse_time(value: str) -> datetime:
    if age := _AGE.fullmatch(value):
        return datetime.now(UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})
    moment = datetime.fromisoformat(value)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def load_keys(path: str, *further: str) -> KeyRing:
    """Return the keys in files that nodes have as `encryption.key_file`; raises `ConfigError`."""
    from quiver.security.key_ring import parse_key_ring, read_key_file  # here: most commands never need it

    return parse_key_ring("\n".join(map(read_key_file, (path, *further))), ", ".join((path, *further)))
