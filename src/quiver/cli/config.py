"""`quiver config`, and a flag for every setting: all made from the one declaration in `quiver.config`.

A command that starts or shows something configurable is decorated with `settings_options` and calls `settings_from`
for the settings in force. `make docs` writes the reference page to `docs/operations/configuration.md`; a test fails
when the two differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click
import msgspec

from quiver.cli.options import json_option
from quiver.cli.output import print_json, print_table
from quiver.config import KIB, MIB, Setting, Settings, all_settings, find_sources, load_settings, redact

PRIVATE_UMASK = 0o077
"""Of processes that make files of nodes: the files are their user's alone, also those that libraries make."""

_UNITS = {
    "bytes": ((MIB, "MiB"), (KIB, "KiB")),
    "ms": ((24 * 3_600_000, "days"), (3_600_000, "hours"), (60_000, "minutes"), (1000, "seconds")),
}
"""By the last word of a setting's name, the larger units that its amounts are also shown in; the largest that divides
the amount wins."""

_PAGE_HEAD = """\
# Configuration

<!-- Made by `make docs` from src/quiver/config; change it there. -->

A setting's value comes from its default, then the TOML file, then the environment, then a flag; the later
wins. An unknown key is an error, wherever it is given. `quiver config show` prints the values in force.

```toml
[log]
durability = "fsync"
segment_bytes_max = 16777216
```
"""

Command = TypeVar("Command", bound=Callable[..., Any])


def settings_options(command: Command) -> Command:
    """Add `--settings-file` and a flag for every setting to a command; `settings_from` reads them."""
    for setting in reversed(list(all_settings())):
        option = click.option(
            setting.flag,
            parameter_of(setting),
            type=_flag_type(setting),
            help=f"{_plain(setting.description)} Default: {show_value(setting.default)}.",
        )
        command = option(command)
    path = click.Path(exists=True, dir_okay=False)
    return click.option("--settings-file", type=path, help="TOML file with settings.")(command)


def insecure_option(command: Command) -> Command:
    """Add `--insecure` to a command that starts nodes."""
    return click.option(
        "--insecure",
        is_flag=True,
        help="Start without TLS and credentials although other machines can reach the node: whoever reaches a port "
        "may do everything. The same as --security-mode insecure.",
    )(command)


def settings_from(options: dict[str, str | None]) -> Settings:
    """Return the settings in force, given the options that `settings_options` added.

    Raises:
        ConfigError: a key is unknown or a value is not allowed.
    """
    text, flags = _read_given(options)
    return load_settings(text, environment=os.environ, flags=flags)


def sources_from(options: dict[str, str | None]) -> dict[str, str]:
    """Return what set each setting that is not left at its default."""
    text, flags = _read_given(options)
    return find_sources(text, environment=os.environ, flags=flags)


def _read_given(options: dict[str, str | None]) -> tuple[str, dict[str, str]]:
    """Return the text of the settings file, and the flags that were given."""
    text = ""
    if path := options["settings_file"]:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    given = {setting.key: options[parameter_of(setting)] for setting in all_settings()}
    return text, {key: value for key, value in given.items() if value is not None}


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Return the settings in force for these arguments of a command with `settings_options`.

    Raises:
        ConfigError: a key is unknown or a value is not allowed.
        click.UsageError: an argument is no flag of a setting.
    """
    command = settings_options(click.Command("node"))
    return settings_from(command.make_context("node", list(arguments)).params)


def parameter_of(setting: Setting) -> str:
    """Return the name of the parameter through which a command receives the flag of a setting."""
    return f"{setting.section}_{setting.name}"


def _flag_type(setting: Setting) -> click.ParamType[Any]:
    """Return the type that click checks; bounds are left to `load_settings`, which checks all sources alike."""
    if isinstance(setting.default, bool):
        return click.Choice(("true", "false"))
    return click.Choice(setting.choices) if setting.choices else click.STRING


def show_value(value: object) -> str:
    """Return a setting's value as TOML writes it, text without its quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(description: str) -> str:
    return description.replace("`", "")


@click.group(epilog="Example: quiver config show --log-durability interval")
def config() -> None:
    """Show settings and their reference page."""


@config.command(epilog="Example: quiver config show --settings-file quiver.toml --json")
@json_option
@settings_options
def show(as_json: bool, **options: str | None) -> None:
    """Print every setting with the value in force."""
    settings = redact(settings_from(options))
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


def render_reference() -> str:
    """Return the page `docs/operations/configuration.md`."""
    return _PAGE_HEAD + "".join(_render_sections())


def _render_sections() -> Iterator[str]:
    section = ""
    for setting in all_settings():
        if setting.section != section:
            section = setting.section
            yield f"\n## [{section}]\n\n| key | default | allowed | environment variable | flag | meaning |\n"
            yield "|---|---|---|---|---|---|\n"
        cells = (
            f"`{setting.name}`",
            _amount(setting, setting.default),
            _allowed(setting),
            f"`{setting.environment_variable}`",
            f"`{setting.flag}`",
            setting.description,
        )
        yield f"| {' | '.join(cells)} |\n"


def _allowed(setting: Setting) -> str:
    if isinstance(setting.default, bool):
        return "`true`, `false`"
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    if isinstance(setting.default, str):
        return "text"
    if setting.at_most is None:
        return f"at least {_amount(setting, setting.at_least)}"
    return f"{_amount(setting, setting.at_least)} to {_amount(setting, setting.at_most)}"


def _amount(setting: Setting, value: object) -> str:
    """Return a value as it is written in a file, followed by its amount in a larger unit if one divides it."""
    for unit, name in _UNITS.get(setting.name.removesuffix("_max").rpartition("_")[2], ()):
        if isinstance(value, int | float) and value > unit and value % unit == 0:
            return f"`{int(value)}` ({int(value) // unit} {name})"
    return f"`{show_value(value)}`" if value != "" else "empty"
