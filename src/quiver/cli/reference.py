"""`quiver cli` and `quiver gateway`: the reference and manual pages of the command line, of HTTP, and completion.

Both pages are made from declarations. `make docs` writes them to `docs/operations/cli.md` and `docs/protocol/http.md`;
a test fails when they differ. The flags of settings, which some commands have, are left to the page of settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import click
from click.shell_completion import get_completion_class

from quiver import __version__
from quiver.cli.config import parameter_of
from quiver.cli.output import print_json
from quiver.config import all_settings
from quiver.gateway.openapi import make_document, render_markdown

_PAGE_HEAD = """\
# The command line

<!-- Made by `make docs` from src/quiver/cli; change it there. -->

`quiver --help` lists the commands, `quiver COMMAND --help` describes one. Results go to standard output, everything
else to standard error; [install.md](install.md) has the exit codes and shell completion. Commands that read have
`--json`.
"""
SHELLS = ("bash", "zsh", "fish")
_SETTINGS = "Every setting is also a flag: see [configuration.md](configuration.md)."


@click.group(epilog="Example: quiver cli docs")
def cli() -> None:
    """Show the command line's reference page."""


@cli.command("docs", epilog="Example: quiver cli docs > docs/operations/cli.md")
@click.pass_context
def cli_docs(context: click.Context) -> None:
    """Print the reference page of all commands, as Markdown."""
    click.echo(render_manual(context.find_root().command), nl=False)


@click.command(epilog='Example: eval "$(quiver completion bash)"')
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options and topics on the Tab key."""
    click.echo(completion_script(context.find_root().command, shell))


@cli.command("completion", hidden=True)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def cli_completion(context: click.Context, shell: str) -> None:
    """Print the script of `quiver completion`, by its earlier name."""
    click.echo(completion_script(context.find_root().command, shell))


def completion_script(root: click.Command, shell: str) -> str:
    """Return the completion script of a shell."""
    found = get_completion_class(shell)
    assert found is not None
    return found(root, {}, "quiver", "_QUIVER_COMPLETE").source()


@cli.command("man", epilog="Example: quiver cli man --to ~/.local/share/man/man1")
@click.option(
    "--to", "directory", type=click.Path(file_okay=False), required=True, help="Directory to write the pages to."
)
@click.pass_context
def cli_man(context: click.Context, directory: str) -> None:
    """Write a manual page for each command, which `man quiver-produce` shows; section 1."""
    os.makedirs(directory, exist_ok=True)
    root = context.find_root().command
    pages = dict(render_man_pages(root, click.Context(root, info_name="quiver")))
    for name, page in pages.items():
        with open(os.path.join(directory, f"{name}.1"), "w", encoding="utf-8") as file:
            file.write(page)
    click.echo(f"wrote {len(pages)} manual pages to {directory}")


def render_man_pages(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the name and the roff text of a command's manual page and of those below it."""
    name = context.command_path.replace(" ", "-")
    yield name, "".join(_render_man(command, context, name))
    if isinstance(command, click.Group):
        for part_name in command.list_commands(context):
            part = command.get_command(context, part_name)
            if part is not None and not part.hidden:
                yield from render_man_pages(part, click.Context(part, info_name=part_name, parent=context))


def _render_man(command: click.Command, context: click.Context, name: str) -> Iterator[str]:
    yield f'.TH "{name.upper()}" "1" "" "quiver {__version__}" "Quiver"\n'
    yield f".SH NAME\n{_roff(name)} \\- {_roff(command.get_short_help_str(limit=200))}\n"
    usage = " ".join(command.collect_usage_pieces(context))
    yield f".SH SYNOPSIS\n.B {_roff(context.command_path)}\n{_roff(usage)}\n"
    yield f".SH DESCRIPTION\n{_roff(_prose(command.help or '')).replace(chr(10) * 2, chr(10) + '.PP' + chr(10))}\n"
    if isinstance(command, click.Group):
        yield ".SH COMMANDS\n"
        for part_name in command.list_commands(context):
            part = command.get_command(context, part_name)
            if part is not None and not part.hidden:
                yield f".TP\n.B {_roff(part_name)}\n{_roff(part.get_short_help_str(limit=200))}\n"
    records = [one.get_help_record(context) for one in command.params if isinstance(one, click.Option)]
    if any(records):
        yield ".SH OPTIONS\n"
        for record in records:
            if record is not None:
                yield f".TP\n.B {_roff(record[0])}\n{_roff(record[1])}\n"
    shown = [line.strip() for line in (command.epilog or "").partition(":")[2].strip().splitlines()]
    if shown:
        yield ".SH EXAMPLES\n" + "".join(f".nf\n{_roff(line)}\n.fi\n" for line in shown)


def _roff(text: str) -> str:
    """Return text in which roff reads nothing as a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    escaped = "".join(one if one.isascii() else f"\\[u{ord(one):04X}]" for one in escaped)
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in escaped.split("\n"))


def render_manual(root: click.Command) -> str:
    """Return the page `docs/operations/cli.md`."""
    return _PAGE_HEAD + "".join(_render(root, click.Context(root, info_name=root.name), is_root=True))


def _render(command: click.Command, context: click.Context, *, is_root: bool = False) -> Iterator[str]:
    if not is_root:
        yield from _render_command(command, context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            part = command.get_command(context, name)
            if part is not None and not part.hidden:
                yield from _render(part, click.Context(part, info_name=name, parent=context))


def _render_command(command: click.Command, context: click.Context) -> Iterator[str]:
    level = context.command_path.count(" ") + 1
    yield f"\n{'#' * level} {context.command_path}\n\n{_prose(command.help or '')}\n"
    if isinstance(command, click.Group):
        return
    yield f"\n```console\n$ {context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    settings = set(map(parameter_of, all_settings()))
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    own = [one for one in options if one.name not in settings]
    if own:
        yield "\n| option | meaning |\n|---|---|\n"
        for option in own:
            yield _render_option(option, context)
    if len(own) < len(options):
        yield f"\n{_SETTINGS}\n"
    yield _render_examples(command.epilog or "")


def _render_option(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None
    names, meaning = (" ".join(part.split()).replace("|", "\\|") for part in record)
    return f"| `{names}` | {meaning} |\n"


def _render_examples(epilog: str) -> str:
    """Return the commands of an epilog as a fenced block."""
    _, _, shown = epilog.partition(":")
    commands = "".join(f"$ {line.strip()}\n" for line in shown.strip().splitlines())
    return f"\n```console\n{commands}```\n" if commands else ""


def _prose(text: str) -> str:
    """Return a help text with each of its paragraphs on one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


@click.group(epilog="Example: quiver gateway openapi > openapi.json")
def gateway() -> None:
    """Show the HTTP interface."""


@gateway.command("docs", epilog="Example: quiver gateway docs > docs/protocol/http.md")
def gateway_docs() -> None:
    """Print the reference page of the HTTP interface, as Markdown."""
    click.echo(render_markdown(), nl=False)


@gateway.command(epilog="Example: quiver gateway openapi > openapi.json")
def openapi() -> None:
    """Print the HTTP interface as an OpenAPI 3.1 document."""
    print_json(make_document())
