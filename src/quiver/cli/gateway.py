"""`quiver gateway`: print the reference page and the OpenAPI document of the HTTP interface."""

from __future__ import annotations

import click

from quiver.cli.output import print_json
from quiver.gateway.openapi import make_document, render_markdown


@click.group(epilog="Example: quiver gateway openapi > openapi.json")
def gateway() -> None:
    """Show the HTTP interface."""


@gateway.command(epilog="Example: quiver gateway docs > docs/protocol/http.md")
def docs() -> None:
    """Print the reference page of the HTTP interface, as Markdown."""
    click.echo(render_markdown(), nl=False)


@gateway.command(epilog="Example: quiver gateway openapi > openapi.json")
def openapi() -> None:
    """Print the HTTP interface as an OpenAPI 3.1 document."""
    print_json(make_document())
