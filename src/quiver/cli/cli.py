"""`quiver cli`: the command line's own reference page, and completion for shells."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from quiver.cli.manual import render_manual


@click.group(epilog="Example: quiver cli completion bash")
def cli() -> None:
    """Show the command line's reference page, and complete it in shells."""


@cli.command(epilog="Example: quiver cli docs > docs/operations/cli.md")
@click.pass_context
def docs(context: click.Context) -> None:
    """Print the reference page of all commands, as Markdown."""
    click.echo(render_manual(context.find_root().command), nl=False)


@cli.command(epilog='Example: eval "$(quiver cli completion bash)"')
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what SHELL is to run so that the tabulator key completes commands, options and topics."""
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(context.find_root().command, {}, "quiver", "_QUIVER_COMPLETE").source())
