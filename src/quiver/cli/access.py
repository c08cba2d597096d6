"""`quiver user`, `quiver token` and `quiver role`: who may use the cluster. `quiver acl` says for what.

The secret of a new token is printed once, or written to a file that only its owner can read; nothing else prints it.
"""

from __future__ import annotations

import os

import click

import quiver
from quiver.cli.options import connect, examples, json_option, url_option
from quiver.cli.output import Cell, format_time, print_json, print_table
from quiver.cli.quantities import DurationType
from quiver.client.access import NewToken
from quiver.errors import NotFoundError, RequestError
from quiver.security.secrets import Secret, read_password, read_secret, write_secret
from quiver.security.tokens import parse_token

_USER = click.argument("user")
_ROLE = click.argument("role")


@click.group(epilog="Example: quiver user create alice")
def user() -> None:
    """Work with users: people and programs that have credentials."""


@user.command(
    "create",
    epilog=examples(
        "quiver user create alice",
        "quiver user create alice --role admin",
        "quiver user create alice --new-password-file alice.password",
    ),
)
@_USER
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="Role that the user gets; may be repeated.")
@click.option("--new-password-file", metavar="FILE", help="File with the password of USER, mode 0600.")
@url_option
def create_user(*, user: str, roles: tuple[str, ...], new_password_file: str | None, url: str) -> None:
    """Create USER; it needs a token or password to authenticate, and grants to do anything."""
    password = "" if new_password_file is None else read_password(new_password_file)
    with connect(url) as cluster:
        cluster.access.create_user(user, password=password)
        for role in roles:
            cluster.access.add_member(role, user)
    click.echo(f"created user {user}" + (f" with {', '.join(roles)}" if roles else ""))


@user.command("list", epilog="Example: quiver user list --json")
@json_option
@url_option
def list_users(*, as_json: bool, url: str) -> None:
    """Print all users, their roles and the number of their tokens."""
    with connect(url) as cluster:
        found = cluster.access.users()
    if as_json:
        print_json(found)
        return
    rows: list[tuple[Cell, ...]] = [
        (
            one.user,
            "yes" if one.is_enabled else "no",
            " ".join(one.roles) or None,
            len(one.tokens),
            format_time(one.created_ms),
        )
        for one in found
    ]
    print_table(("user", "enabled", "roles", "tokens", "created"), rows)


@user.command(
    "password",
    epilog=examples("quiver user password alice", "quiver user password alice --new-password-file alice.password"),
)
@_USER
@click.option("--new-password-file", metavar="FILE", help="File with the password, mode 0600.  [default: ask for it]")
@url_option
def set_password(*, user: str, new_password_file: str | None, url: str) -> None:
    """Set the password of USER; the cluster stores a verifier, from which it cannot be read.

    Connections that used the old password are refused from then on.
    """
    if new_password_file is None:
        password = Secret(click.prompt("New password", hide_input=True, confirmation_prompt=True, err=True))
    else:
        password = read_password(new_password_file)
    with connect(url) as cluster:
        cluster.access.set_password(user, password)
    click.echo(f"set the password of user {user}")


@user.command("disable", epilog="Example: quiver user disable alice")
@_USER
@click.option("--undo", "is_undone", is_flag=True, help="Let the user authenticate again.")
@url_option
def disable_user(*, user: str, is_undone: bool, url: str) -> None:
    """Refuse USER from now on, also on open connections; its tokens and grants stay."""
    with connect(url) as cluster:
        cluster.access.enable_user(user, is_enabled=is_undone)
    click.echo(f"user {user} is {'enabled' if is_undone else 'disabled'}")


@user.command("delete", epilog="Example: quiver user delete alice")
@_USER
@url_option
def delete_user(*, user: str, url: str) -> None:
    """Delete USER with its tokens, roles and grants; its open connections are refused from then on."""
    with connect(url) as cluster:
        cluster.access.delete_user(user)
    click.echo(f"deleted user {user}")


@click.group(epilog="Example: quiver token create alice --lasting 90d --out alice.token")
def token() -> None:
    """Work with tokens, by which users authenticate."""


@token.command(
    "create",
    epilog=examples("quiver token create alice --lasting 90d --out alice.token", "quiver token create alice --json"),
)
@_USER
@click.option("--lasting", "lasting_ms", type=DurationType(), help="Time after which it expires.  [default: never]")
@click.option("--out", metavar="FILE", help="Write the token to this new file, mode 0600, and do not print it.")
@json_option
@url_option
def create_token(*, user: str, lasting_ms: int | None, out: str | None, as_json: bool, url: str) -> None:
    """Create a token of USER, and print it: once, the cluster stores only a hash.

    A user has two tokens at most: for rotation, create the second, use it everywhere, then revoke the first.
    """
    if out is not None and os.path.lexists(out):
        raise RequestError(f"not done: {out} exists: name another file, or remove it first", code="file_exists")
    with connect(url) as cluster:
        lasting = None if lasting_ms is None else lasting_ms / 1000
        created = cluster.access.create_token(user, lasting=lasting)
        if out is not None:
            _write_token(cluster, created, out)
    _print_token(created, out, as_json=as_json)


def _write_token(cluster: quiver.Cluster, created: NewToken, path: str) -> None:
    try:
        write_secret(path, created.secret)
    except (OSError, RequestError):
        cluster.access.revoke_token(created.token_id)  # nobody has it
        raise


def _print_token(created: NewToken, out: str | None, *, as_json: bool) -> None:
    expires = "never" if created.expires_ms is None else format_time(created.expires_ms)
    if as_json:
        shown = {"token": created.secret.reveal()} if out is None else {"file": os.path.abspath(out)}
        print_json({"token_id": created.token_id, "expires_ms": created.expires_ms, **shown})
        return
    if out is None:
        click.echo(created.secret.reveal())
        click.echo(f"token {created.token_id} expires: {expires}; it is not shown again", err=True)
        return
    click.echo(f"created token {created.token_id} in {out}, expires: {expires}")


@token.command("list", epilog="Example: quiver token list --user alice")
@click.option("--user", help="Only those of this user.")
@json_option
@url_option
def list_tokens(*, user: str | None, as_json: bool, url: str) -> None:
    """Print the ids of all tokens, their users and when they expire."""
    with connect(url) as cluster:
        found = cluster.access.tokens(user)
    if as_json:
        print_json(found)
        return
    rows: list[tuple[Cell, ...]] = [
        (
            one.token_id,
            one.user,
            format_time(one.created_ms),
            None if one.expires_ms is None else format_time(one.expires_ms),
        )
        for one in found
    ]
    print_table(("token", "user", "created", "expires"), rows)


@token.command("revoke", epilog=examples("quiver token revoke 0011223344556677", "quiver token revoke --in old.token"))
@click.argument("token_id", metavar="[ID]", default="")
@click.option("--in", "path", metavar="FILE", help="Revoke the token in this file instead of naming its id.")
@url_option
def revoke_token(*, token_id: str, path: str | None, url: str) -> None:
    """Revoke the token ID, which is the part of a token between its underscores; open connections lose it, too."""
    if bool(token_id) == (path is not None):
        raise RequestError("not done: give the id of a token, or its file with --in", code="bad_request")
    if path is not None:
        token_id = parse_token(read_secret(path).reveal().strip()).id
    with connect(url) as cluster:
        cluster.access.revoke_token(token_id)
    click.echo(f"revoked token {token_id}")


@click.group(epilog="Example: quiver role create readers")
def role() -> None:
    """Work with roles: grants that several users share. The role `admin` exists, and may do everything."""


@role.command("create", epilog="Example: quiver role create readers")
@_ROLE
@url_option
def create_role(*, role: str, url: str) -> None:
    """Create ROLE; `quiver acl grant role:ROLE …` says what it allows."""
    with connect(url) as cluster:
        cluster.access.create_role(role)
    click.echo(f"created role {role}")


@role.command("list", epilog="Example: quiver role list")
@json_option
@url_option
def list_roles(*, as_json: bool, url: str) -> None:
    """Print all roles with their members and the number of their grants."""
    with connect(url) as cluster:
        found = cluster.access.roles()
    if as_json:
        print_json(found)
        return
    rows: list[tuple[Cell, ...]] = [(one.role, " ".join(one.users) or None, len(one.grants)) for one in found]
    print_table(("role", "users", "grants"), rows)


@role.command("show", epilog="Example: quiver role show readers")
@_ROLE
@json_option
@url_option
def show_role(*, role: str, as_json: bool, url: str) -> None:
    """Print ROLE's members and what it allows."""
    with connect(url) as cluster:
        found = next((one for one in cluster.access.roles() if one.role == role), None)
    if found is None:
        raise NotFoundError(f"unknown role {role!r}", code="unknown_role")
    if as_json:
        print_json(found)
        return
    click.echo(f"users: {' '.join(found.users) or '-'}")
    for grant in found.grants:
        click.echo(str(grant))


@role.command("add", epilog="Example: quiver role add readers alice")
@_ROLE
@_USER
@url_option
def add_member(*, role: str, user: str, url: str) -> None:
    """Give ROLE to USER."""
    with connect(url) as cluster:
        cluster.access.add_member(role, user)
    click.echo(f"user {user} has role {role}")


@role.command("remove", epilog="Example: quiver role remove readers alice")
@_ROLE
@_USER
@url_option
def remove_member(*, role: str, user: str, url: str) -> None:
    """Take ROLE from USER."""
    with connect(url) as cluster:
        cluster.access.remove_member(role, user)
    click.echo(f"user {user} no longer has role {role}")


@role.command("delete", epilog="Example: quiver role delete readers")
@_ROLE
@url_option
def delete_role(*, role: str, url: str) -> None:
    """Delete ROLE with its grants; its members lose what it allowed."""
    with connect(url) as cluster:
        cluster.access.delete_role(role)
    click.echo(f"deleted role {role}")
