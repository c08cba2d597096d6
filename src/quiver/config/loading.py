"""Find the value of every setting: default, then TOML file, then environment variable, then flag; later wins.

The environment variable of `log.segment_bytes_max` is `QUIVER_LOG__SEGMENT_BYTES_MAX`, its flag
`--log-segment-bytes-max`. An unknown key is an error: a misspelt setting must never be silently ignored. Variables of
clients, such as `QUIVER_URL`, are no settings of a node.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from quiver.config.security import complete
from quiver.config.settings import Settings
from quiver.contexts import VARIABLES
from quiver.errors import ConfigError
from quiver.security.secrets import HIDDEN

ENVIRONMENT_PREFIX = "QUIVER_"
_PASSWORD = re.compile(r"([?&]\w*(?:password|passwd|sslpassword)=)[^&]*", re.IGNORECASE)


class Setting(msgspec.Struct, frozen=True):
    """One setting with its default, bounds and description, from which flags and the reference page are generated."""

    section: str
    name: str
    default: object
    choices: tuple[str, ...]
    description: str
    at_least: float | None
    at_most: float | None

    @property
    def key(self) -> str:
        """Return the dotted key, as in TOML."""
        return f"{self.section}.{self.name}"

    @property
    def environment_variable(self) -> str:
        """Return the environment variable that sets it."""
        return f"{ENVIRONMENT_PREFIX}{self.section}__{self.name}".upper()

    @property
    def flag(self) -> str:
        """Return the command-line flag that sets it; flags of the `node` section have no prefix."""
        if self.section == "node":
            return f"--{self.name}".replace("_", "-")
        return f"--{self.section}-{self.name}".replace("_", "-")


def all_settings() -> Iterator[Setting]:
    """Yield every setting in the order of its declaration."""
    for section in msgspec.structs.fields(Settings):
        section_type = type(section.default)
        hints = get_type_hints(section_type, include_extras=True)
        for field in msgspec.structs.fields(section_type):
            annotated = get_args(hints[field.name])
            meta: Meta = annotated[1]
            yield Setting(
                section=section.name,
                name=field.name,
                default=field.default,
                choices=tuple(str(choice) for choice in get_args(annotated[0])),
                description=meta.description or "",
                at_least=meta.ge,
                at_most=meta.le,
            )


def load_settings(
    toml: str = "", *, environment: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Settings:
    """Combine defaults, the text of a TOML file, environment variables and flags (`{"log.durability": "none"}`).

    Raises:
        ConfigError: a key is unknown or a value is not allowed; the message names the key.
    """
    tree = _parse_toml(toml)
    known = {setting.key: setting for setting in all_settings()}
    for variable, value in sorted((environment or {}).items()):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in VARIABLES:
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".", 1)
            _assign(tree, key, value, known, where=f"environment variable {variable}")
    for key, value in (flags or {}).items():
        _assign(tree, key, value, known, where=f"flag for {key}")
    try:
        # strict=False turns the strings of flags and variables into the declared types.
        return complete(msgspec.convert(tree, Settings, strict=False))
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}; docs/operations/configuration.md lists the allowed values") from None


def find_sources(
    toml: str = "", *, environment: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what set each setting that `load_settings` does not leave at its default."""
    sources = {f"{section}.{name}": "file" for section, table in _parse_toml(toml).items() for name in table}
    for setting in all_settings():
        if setting.environment_variable in (environment or {}):
            sources[setting.key] = f"environment ({setting.environment_variable})"
        if setting.key in (flags or {}):
            sources[setting.key] = f"flag ({setting.flag})"
    return sources


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the settings file is not valid TOML: {error}") from None


def _assign(tree: dict[str, Any], key: str, value: str, known: Mapping[str, Setting], *, where: str) -> None:
    setting = known.get(key)
    if setting is None:
        raise ConfigError(f"{where}: unknown setting {key!r}; docs/operations/configuration.md lists all settings")
    section = tree.setdefault(setting.section, {})
    if not isinstance(section, dict):
        raise ConfigError(f"settings: [{setting.section}] must be a table of settings")
    section[setting.name] = value


OWN_SECTIONS = frozenset(("node", "tls", "security"))
"""Sections that differ between nodes, and that name addresses, files and credentials."""


def list_shared(settings: Settings) -> dict[str, str]:
    """Return the settings that nodes of a cluster usually share, by key; none of them is a secret."""
    return {
        one.key: str(getattr(getattr(settings, one.section), one.name))
        for one in all_settings()
        if one.section not in OWN_SECTIONS
    }


def redact(settings: Settings) -> Settings:
    """Return settings that can be shown: the password in the URL of a database is hidden."""
    return msgspec.structs.replace(
        settings, node=msgspec.structs.replace(settings.node, metadata_db=redact_url(settings.node.metadata_db))
    )


def redact_url(url: str) -> str:
    """Return a URL in which the passwords are hidden: before the host, and in its parameters."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url if "@" not in url else HIDDEN
    authority, slash, path = rest.partition("/")
    login, at, host = authority.rpartition("@")
    if at and ":" in login:
        login = f"{login.partition(':')[0]}:{HIDDEN}"
    return _PASSWORD.sub(rf"\1{HIDDEN}", f"{scheme}{separator}{login}{at}{host}{slash}{path}")
