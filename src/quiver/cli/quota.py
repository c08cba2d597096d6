"""`quiver quota`: how much a principal, the members of a role, or the users of a topic may use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from quiver.cli.acl import parse_subject
from quiver.cli.options import connect, examples, json_option, url_option
from quiver.cli.output import Cell, print_json, print_table
from quiver.cli.quantities import UNLIMITED, SizeType, format_size
from quiver.errors import RequestError
from quiver.security.limits import DEFAULT_SUBJECT, LIMIT_MAX, TOPIC_PREFIX, WEIGHT_MAX, QuotaLimits

C = TypeVar("C", bound=Callable[..., Any])


class CountType(click.ParamType[int]):
    """Parse a number, or `unlimited`."""

    name = "count"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002 - click's signature
        """Return the placeholder that the help shows."""
        return "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; fail with a usage error if it is none."""
        if value == "unlimited":
            return UNLIMITED
        if not str(value).isdecimal() or not 1 <= int(value) <= LIMIT_MAX:
            self.fail(f"{value!r} is no limit: give a whole number from 1 to {LIMIT_MAX}, or unlimited", param, ctx)
        return int(value)


_SIZE = SizeType(or_unlimited=True)
_COUNT = CountType()
_WEIGHT = click.IntRange(1, WEIGHT_MAX)
_OPTIONS: Final[tuple[tuple[str, str, click.ParamType[int], str], ...]] = (
    ("requests_per_second", "--requests", _COUNT, "Requests a second."),
    ("mutations_per_second", "--mutations", _COUNT, "Requests a second that change something."),
    ("bytes_in_per_second", "--bytes-in", _SIZE, "Bytes of requests a second, such as 10MB."),
    ("bytes_out_per_second", "--bytes-out", _SIZE, "Bytes of answers a second, such as 10MB."),
    ("creations_per_minute", "--creations", _COUNT, "Topics, producers and consumers created a minute."),
    ("long_polls_max", "--long-polls", _COUNT, "Requests that wait for messages, on each node."),
    ("connections_max", "--connections", _COUNT, "Connections of the wire protocol, to each node."),
    ("topics_max", "--topics", _COUNT, "Topics that a user owns; deleted ones count until they are purged."),
    ("partitions_max", "--partitions", _COUNT, "Partitions of these topics."),
    ("registrations_max", "--registrations", _COUNT, "Producers, consumers and holds of a user."),
    ("weight", "--weight", _WEIGHT, "Share of the turns while a node is overloaded: 2 gets twice as many as 1."),
)
"""The limits, with the options that set them."""


def _subject_options(command: C) -> C:
    """Add the options that say whose quotas are meant."""
    for option in (
        click.option("--default", "is_default", is_flag=True, help="Every principal without a limit of its own."),
        click.option(
            "--topic", help="A topic, also one that does not exist yet; '*' is every topic without a limit of its own."
        ),
        click.option("--principal", help="A user (alice), a role (role:readers) or anonymous."),
    ):
        command = option(command)
    return command


def _limit_options(command: C) -> C:
    for name, flag, kind, text in reversed(_OPTIONS):
        command = click.option(flag, name, type=kind, help=text)(command)
    return command


def parse_quota_subject(*, principal: str | None, topic: str | None, is_default: bool) -> str | None:
    """Return the subject that options name; None if they name none.

    Raises:
        RequestError: they name more than one.
    """
    given = [one for one in (principal, topic, is_default or None) if one is not None]
    if len(given) > 1:
        raise RequestError("give only one of --principal, --topic and --default", code="bad_quota")
    if principal is not None:
        return parse_subject(principal)
    if topic is not None:
        return TOPIC_PREFIX + topic
    return DEFAULT_SUBJECT if is_default else None


def _require_subject(subject: str | None) -> str:
    if subject is None:
        raise RequestError("say whose quota is meant: --principal, --topic or --default", code="bad_quota")
    return subject


@click.group(epilog="Example: quiver quota set --principal alice --bytes-in 10MB --topics 20")
def quota() -> None:
    """Work with quotas: a user's own come before those of its roles, and they before the default."""


@quota.command(
    "set",
    epilog=examples(
        "quiver quota set --principal alice --bytes-in 10MB --topics 20",
        "quiver quota set --default --requests 1000 --registrations 500",
        "quiver quota set --topic logs.web --bytes-in 50MiB",
        "quiver quota set --principal role:batch --requests unlimited",
    ),
)
@_subject_options
@_limit_options
@url_option
def set_quota(*, principal: str | None, topic: str | None, is_default: bool, url: str, **given: int | None) -> None:
    """Set limits; those that are not given stay as they are. They apply from the next request on.

    Rates, long polls and connections are limited on each node; topics, partitions and registrations in the cluster.
    """
    subject = _require_subject(parse_quota_subject(principal=principal, topic=topic, is_default=is_default))
    limits = QuotaLimits(**given)
    if not limits.names:
        flags = ", ".join(flag for _, flag, _, _ in _OPTIONS)
        raise RequestError(f"give at least one limit: {flags}", code="bad_quota")
    with connect(url) as cluster:
        cluster.access.set_quota(subject, limits)
    click.echo(f"{subject}: {', '.join(f'{name} {_show(limits, name)}' for name in limits.names)}")


@quota.command(
    "remove",
    epilog=examples("quiver quota remove --principal alice", "quiver quota remove --topic logs.web"),
)
@_subject_options
@url_option
def remove_quota(*, principal: str | None, topic: str | None, is_default: bool, url: str) -> None:
    """Remove all limits; those of the user's roles, the default, or the nodes' settings apply from then on."""
    subject = _require_subject(parse_quota_subject(principal=principal, topic=topic, is_default=is_default))
    with connect(url) as cluster:
        cluster.access.remove_quota(subject)
    click.echo(f"removed the quotas of {subject}")


@quota.command("list", epilog=examples("quiver quota list", "quiver quota list --principal alice --json"))
@_subject_options
@json_option
@url_option
def list_quotas(*, principal: str | None, topic: str | None, is_default: bool, as_json: bool, url: str) -> None:
    """Print all quotas, or those that are set for one principal, topic or the default."""
    subject = parse_quota_subject(principal=principal, topic=topic, is_default=is_default)
    with connect(url) as cluster:
        found = cluster.access.quotas(subject)
    if as_json:
        print_json(found)
        return
    rows: list[tuple[Cell, ...]] = [
        (one.subject, name, _show(one.limits, name)) for one in found for name in one.limits.names
    ]
    print_table(("subject", "quota", "limit"), rows)


def _show(limits: QuotaLimits, name: str) -> str:
    """Return a limit as an option accepts it."""
    amount: int = getattr(limits, name)
    if amount == UNLIMITED:
        return "unlimited"
    return format_size(amount) if name.startswith("bytes_") else str(amount)
