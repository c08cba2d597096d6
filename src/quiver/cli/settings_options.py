"""Flags for every setting, made from the one declaration of them in `quiver.config`.

A command that starts or shows something configurable wears `settings_options` and asks `settings_from` for
the tree in force.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from quiver.cli.reference import show_value
from quiver.config import Setting, Settings, all_settings, load_settings

Command = TypeVar("Command", bound=Callable[..., Any])


def settings_options(command: Command) -> Command:
    """Give a command `--settings-file` and a flag for every setting; `settings_from` reads them."""
    for setting in reversed(list(all_settings())):
        option = click.option(
            setting.flag,
            parameter_of(setting),
            type=_kind(setting),
            help=f"{_plain(setting.description)} Default: {show_value(setting.default)}.",
        )
        command = option(command)
    path = click.Path(exists=True, dir_okay=False)
    return click.option("--settings-file", type=path, help="TOML file with settings.")(command)


def settings_from(options: dict[str, str | None]) -> Settings:
    """Return the settings in force, given the options that `settings_options` added.

    Raises:
        ConfigError: a key is unknown or a value is not allowed.
    """
    text = ""
    if path := options["settings_file"]:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    given = {setting.key: options[parameter_of(setting)] for setting in all_settings()}
    flags = {key: value for key, value in given.items() if value is not None}
    return load_settings(text, environment=os.environ, flags=flags)


def _kind(setting: Setting) -> click.ParamType[Any]:
    """Return what click checks of a flag; bounds are left to `load_settings`, which checks all sources alike."""
    if isinstance(setting.default, bool):
        return click.Choice(("true", "false"))
    return click.Choice(setting.choices) if setting.choices else click.STRING


def parameter_of(setting: Setting) -> str:
    """Return the name under which a command gets the flag of a setting."""
    return f"{setting.section}_{setting.name}"


def _plain(description: str) -> str:
    return description.replace("`", "")
