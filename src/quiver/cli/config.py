"""`quiver config`: what is set, and what can be."""

from __future__ import annotations

import click
import msgspec

from quiver.cli.output import print_json, print_table
from quiver.cli.reference import render_reference, show_value
from quiver.cli.settings_options import settings_from, settings_options
from quiver.config import all_settings


@click.group(epilog="Example: quiver config show --log-durability interval")
def config() -> None:
    """Show settings and their reference page."""


@config.command(epilog="Example: quiver config show --settings-file quiver.toml --json")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options
def show(as_json: bool, **options: str | None) -> None:
    """Print every setting with the value in force."""
    settings = settings_from(options)
    if as_json:
        print_json(settings)
        return
    tree = msgspec.to_builtins(settings)
    rows = [(s.key, show_value(tree[s.section][s.name]) or None, show_value(s.default) or None) for s in all_settings()]
    print_table(("setting", "value", "default"), rows)


@config.command(epilog="Example: quiver config docs > docs/operations/configuration.md")
def docs() -> None:
    """Print the reference page of all settings, as Markdown."""
    click.echo(render_reference(), nl=False)
