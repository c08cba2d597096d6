"""`quiver context`: name clusters once, and use them by name everywhere."""

from __future__ import annotations

import click
import msgspec

from quiver.cli.options import examples, json_option, refuse_secrets
from quiver.cli.output import print_json, print_table
from quiver.client.discovery import parse_seeds
from quiver.contexts import (
    Context,
    add_context,
    contexts_path,
    find_context,
    load_contexts,
    remove_context,
    resolve,
    split_addresses,
    use_context,
)
from quiver.security.secrets import read_password, read_secret

_NAME = click.argument("name")


@click.group(epilog="Example: quiver context add prod https://broker-1:8002 --ca-file ca.pem")
def context() -> None:
    """Name clusters: addresses, TLS files, tokens, users.

    The command line, the SDK, Spark, pipelines and the classic library use them.

    --url and --context come first, then QUIVER_URL, QUIVER_CONTEXT, the context in use, and at last a cluster on this
    machine.
    """


@context.command(
    "add",
    epilog=examples(
        "quiver context add prod https://broker-1:8002 https://broker-2:8002 --ca-file ca.pem",
        "quiver context add prod https://broker-1:8002 --ca-file ca.pem --token-file ~/.config/quiver/prod.token",
        "quiver context add prod broker-1:9002 --ca-file ca.pem --username alice --password-file a.password",
        "quiver context add local http://127.0.0.1:8002 --use",
    ),
)
@_NAME
@click.argument("addresses", nargs=-1, required=True, metavar="URL...")
@click.option("--tls", is_flag=True, help="Use TLS for addresses without a scheme; implied by each of the files.")
@click.option("--ca-file", default="", metavar="FILE", help="CA certificates that verify the cluster's certificates.")
@click.option("--certificate-file", default="", metavar="FILE", help="Client certificate.")
@click.option("--key-file", default="", metavar="FILE", help="Private key of the client certificate.")
@click.option("--token-file", default="", metavar="FILE", help="File with the token of this client, mode 0600.")
@click.option("--username", "user", default="", metavar="USER", help="User that proves a password, not a token.")
@click.option("--password-file", default="", metavar="FILE", help="File with the password of the user, mode 0600.")
@refuse_secrets
@click.option("--use", "is_used", is_flag=True, help="Use it from now on.  [default: only if it is the first]")
def add(
    *,
    name: str,
    addresses: tuple[str, ...],
    tls: bool,
    ca_file: str,
    certificate_file: str,
    key_file: str,
    token_file: str,
    user: str,
    password_file: str,
    is_used: bool,
) -> None:
    """Store the cluster at URL... under NAME; it replaces the context of that name."""
    parse_seeds(addresses)  # refuses what is no address
    stored = Context(
        addresses=split_addresses(addresses),
        tls=tls,
        ca_file=ca_file,
        certificate_file=certificate_file,
        key_file=key_file,
        token_file=token_file,
        user=user,
        password_file=password_file,
    )
    if token_file:
        read_secret(token_file)  # refuses a file that others can read
    if password_file:
        read_password(password_file)
    add_context(name, stored, is_used=is_used)
    in_use = load_contexts().current
    click.echo(f"added {name}" + (", in use now" if in_use == name else f"; in use is {in_use}"))


@context.command("list", epilog="Example: quiver context list")
@json_option
def list_contexts(*, as_json: bool) -> None:
    """Print all contexts; a star marks the one in use."""
    stored = load_contexts()
    if as_json:
        print_json(stored)
        return
    if not stored.contexts:
        click.echo(f"no contexts in {contexts_path()}")
        return
    rows = [
        (
            "*" if name == stored.current else None,
            name,
            ",".join(one.addresses),
            one.ca_file or None,
            one.token_file or one.password_file or None,
            one.user or None,
        )
        for name, one in sorted(stored.contexts.items())
    ]
    print_table(("use", "name", "addresses", "ca file", "token or password file", "user"), rows)


@context.command("use", epilog="Example: quiver context use prod")
@_NAME
def use(*, name: str) -> None:
    """Use NAME whenever nothing else names a cluster; "" means none."""
    use_context(name)
    click.echo(f"in use: {name or 'none'}")


@context.command("show", epilog="Example: quiver context show --json")
@click.argument("name", required=False)
@json_option
def show(*, name: str | None, as_json: bool) -> None:
    """Print NAME, or the cluster that commands reach now, and what named it."""
    shown = resolve() if name is None else find_context(name)
    if as_json:
        print_json(shown)
        return
    for field, value in msgspec.structs.asdict(shown).items():
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        click.echo(f"{field}: {text}".rstrip())


@context.command("remove", epilog="Example: quiver context remove old")
@_NAME
def remove(*, name: str) -> None:
    """Remove NAME; the cluster itself is not changed."""
    remove_context(name)
    click.echo(f"removed {name}")
