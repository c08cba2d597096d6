"""`quiver deploy`: list, print and copy the files that operators install, which come with the package."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import click

import quiver.deploy
from quiver.cli.options import examples, json_option
from quiver.cli.output import print_json, print_table
from quiver.errors import NotFoundError

_ROOT = os.path.dirname(quiver.deploy.__file__)
_CODE = ("__init__.py", "__pycache__")

_ABOUT = {
    "completions": "completion of commands and topics in shells",
    "docker": "container image, and a cluster of three nodes with Prometheus and Grafana",
    "grafana": "dashboard",
    "kubernetes": "Helm chart",
    "prometheus": "alert rules",
    "systemd": "units: one node per host, or several",
}
"""What the files of a directory are for."""


@click.group(epilog="Example: quiver deploy list")
def deploy() -> None:
    """Show the files that operators install: units, images, charts, alert rules, dashboards."""


@deploy.command("list", epilog="Example: quiver deploy list --json")
@json_option
def list_(*, as_json: bool) -> None:
    """List the files by name, with what they are for."""
    rows = [(name, _ABOUT[name.split("/")[0]]) for name in list_files()]
    if as_json:
        print_json([{"name": name, "about": about} for name, about in rows])
        return
    print_table(("name", "about"), rows)


@deploy.command(
    epilog="Example: quiver deploy show systemd/quiver.service > /etc/systemd/system/quiver.service",
)
@click.argument("name")
def show(*, name: str) -> None:
    """Print the file NAME."""
    if name not in list_files():
        raise _unknown(name)
    with open(os.path.join(_ROOT, name), encoding="utf-8") as file:
        click.echo(file.read(), nl=False)


@deploy.command(
    epilog=examples("quiver deploy copy kubernetes/quiver ./quiver-chart", "quiver deploy copy docker ./quiver-docker")
)
@click.argument("name")
@click.argument("directory", type=click.Path(file_okay=False))
def copy(*, name: str, directory: str) -> None:
    """Copy all files under NAME, such as a chart, to DIRECTORY, which must be empty or not exist."""
    below = f"{name.rstrip('/')}/"
    found = [one for one in list_files() if one.startswith(below)]
    if not found:
        raise _unknown(name)
    if os.path.isdir(directory) and os.listdir(directory):
        raise click.UsageError(f"{directory} is not empty, nothing was copied: name a directory that does not exist")
    for one in found:
        target = os.path.join(directory, one.removeprefix(below))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy(os.path.join(_ROOT, one), target)  # with its mode: an entry point stays executable
    click.echo(f"copied {len(found)} files to {directory}")


def list_files() -> list[str]:
    """Return the names of all files, such as `systemd/quiver.service`, sorted."""
    return sorted(_walk(""))


def _walk(below: str) -> Iterator[str]:
    for entry in os.scandir(os.path.join(_ROOT, below)):
        if entry.name in _CODE:
            continue
        name = f"{below}/{entry.name}" if below else entry.name
        if entry.is_dir():
            yield from _walk(name)
        else:
            yield name


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"there is no {name!r} among the files of this package", code="unknown_file")
