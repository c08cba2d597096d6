"""`quiver acl`: grants, which say what a user or role may do, and why a request would be refused."""

from __future__ import annotations

from typing import Any, Final

import click

from quiver.cli.options import connect, examples, json_option, url_option
from quiver.cli.output import DONE, FOUND, Cell, print_json, print_table
from quiver.errors import RequestError
from quiver.security.permissions import ANONYMOUS_SUBJECT, ROLE_PREFIX, USER_PREFIX, Grant, ResourceKind, Verb

_VERBS: Final = ", ".join(Verb)
_SYNTAX: Final = (
    "SUBJECT is a user (alice, user:alice), a role (role:readers) or anonymous. RESOURCE is a topic (logs.web), the "
    "topics whose names begin alike ('logs.*'; '*' is all), the same of other kinds (consumer:report, "
    "'producer:web-*'), or the cluster (cluster)."
)


class VerbType(click.ParamType[Verb]):
    """Parse a verb."""

    name = "verb"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Verb:
        """Return the verb of a name; fail with a usage error if there is none."""
        try:
            return Verb(value)
        except ValueError:
            self.fail(f"{value!r} is no verb; verbs are: {_VERBS}", param, ctx)


_SUBJECT = click.argument("subject")
_VERB = click.argument("verb", type=VerbType())
_RESOURCE = click.argument("resource")


def parse_subject(text: str) -> str:
    """Return the subject of a grant; a name alone is a user's."""
    is_whole = text == ANONYMOUS_SUBJECT or text.startswith((USER_PREFIX, ROLE_PREFIX))
    return text if is_whole else USER_PREFIX + text


def parse_resource(text: str) -> tuple[ResourceKind, str, bool]:
    """Return a resource's kind, its name or prefix, and whether that is a prefix; a name alone is a topic's.

    Raises:
        RequestError: it is no resource.
    """
    if text == ResourceKind.CLUSTER:
        return ResourceKind.CLUSTER, "", False
    kind, colon, name = text.partition(":")
    if not colon:
        kind, name = ResourceKind.TOPIC, text
    is_prefix = name.endswith("*")
    name = name.removesuffix("*")
    named = [one for one in ResourceKind if one is not ResourceKind.CLUSTER]
    if kind not in named or "*" in name or not (name or is_prefix):
        kinds = ", ".join(f"{one}:NAME" for one in named)
        raise RequestError(
            f"{text!r} is no resource; give a topic's name, {kinds} or cluster; a star at the end is a prefix",
            code="bad_resource",
        )
    return ResourceKind(kind), name, is_prefix


def _grant(subject: str, verb: Verb, resource: str) -> Grant:
    kind, name, is_prefix = parse_resource(resource)
    return Grant(subject=parse_subject(subject), verb=verb, kind=kind, name=name, is_prefix=is_prefix)


@click.group(epilog="Example: quiver acl grant alice read 'logs.*'")
def acl() -> None:
    """Work with grants. What no grant allows is denied."""


@acl.command(
    "grant",
    epilog=examples(
        "quiver acl grant alice read 'logs.*'",
        "quiver acl grant role:writers write logs.web",
        "quiver acl grant alice admin cluster",
    ),
    help=f"Allow SUBJECT a VERB ({_VERBS}) on RESOURCE.\n\n{_SYNTAX}",
)
@_SUBJECT
@_VERB
@_RESOURCE
@url_option
def add_grant(*, subject: str, verb: Verb, resource: str, url: str) -> None:
    """Add a grant."""
    wanted = _grant(subject, verb, resource)
    with connect(url) as cluster:
        cluster.access.add_grant(wanted)
    click.echo(str(wanted))


@acl.command(
    "revoke",
    epilog="Example: quiver acl revoke alice read 'logs.*'",
    help="Remove the grant of VERB on RESOURCE to SUBJECT, as `quiver acl list` shows it; other grants stay.",
)
@_SUBJECT
@_VERB
@_RESOURCE
@url_option
def remove_grant(*, subject: str, verb: Verb, resource: str, url: str) -> None:
    """Remove a grant."""
    wanted = _grant(subject, verb, resource)
    with connect(url) as cluster:
        cluster.access.remove_grant(wanted)
    click.echo(f"revoked: {wanted}")


@acl.command("list", epilog="Example: quiver acl list --subject role:readers")
@click.option("--subject", help="Only those of this user, role or anonymous.")
@json_option
@url_option
def list_grants(*, subject: str | None, as_json: bool, url: str) -> None:
    """Print all grants."""
    with connect(url) as cluster:
        found = cluster.access.grants(None if subject is None else parse_subject(subject))
    if as_json:
        print_json(found)
        return
    rows: list[tuple[Cell, ...]] = [(one.subject, one.verb.value, _resource(one)) for one in found]
    print_table(("subject", "verb", "resource"), rows)


def _resource(grant: Grant) -> str:
    """Return a resource in the form that `parse_resource` accepts."""
    if grant.kind is ResourceKind.CLUSTER:
        return grant.kind.value
    return f"{grant.kind}:{grant.name}{'*' if grant.is_prefix else ''}"


@acl.command(
    "test",
    epilog=examples("quiver acl test alice write logs.web", "quiver acl test anonymous read logs.web --json"),
    help=f"Print whether SUBJECT may do VERB ({_VERBS}) on RESOURCE, and what decides it; exit with 1 if not.",
)
@_SUBJECT
@_VERB
@_RESOURCE
@json_option
@url_option
@click.pass_context
def explain_access(
    context: click.Context, /, *, subject: str, verb: Verb, resource: str, as_json: bool, url: str
) -> None:
    """Explain a verdict."""
    kind, name, is_prefix = parse_resource(resource)
    if is_prefix:
        raise RequestError("name one resource: a prefix can be allowed in part", code="bad_resource")
    with connect(url) as cluster:
        verdict = cluster.access.explain(parse_subject(subject), verb, kind, name)
    if as_json:
        print_json(verdict)
    else:
        click.echo(f"{'allowed' if verdict.is_allowed else 'denied'}: {verdict.reason}")
    context.exit(DONE if verdict.is_allowed else FOUND)
