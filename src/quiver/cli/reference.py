"""The reference page of all settings, made from their one declaration in `quiver.config`.

`make docs` writes it to `docs/operations/configuration.md`; a test fails when the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from quiver.config import KIB, MIB, Setting, all_settings

_UNITS = {
    "bytes": ((MIB, "MiB"), (KIB, "KiB")),
    "ms": ((24 * 3_600_000, "days"), (3_600_000, "hours"), (60_000, "minutes"), (1000, "seconds")),
}
"""By a setting's last word, the units in which its amounts are also told; the largest that divides wins."""

_PAGE_HEAD = """\
# Configuration

<!-- Made by `make docs` from src/quiver/config.py; change it there. -->

A setting's value comes from its default, then the TOML file, then the environment, then a flag; the later
wins. A key that does not exist is an error, wherever it is given. `quiver config show` prints what is in force.

```toml
[log]
durability = "fsync"
segment_bytes_max = 16777216
```
"""


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
    """Return a value as it is written in a file, with its size in words where that is easier to read."""
    for unit, name in _UNITS.get(setting.name.removesuffix("_max").rpartition("_")[2], ()):
        if isinstance(value, int | float) and value > unit and value % unit == 0:
            return f"`{int(value)}` ({int(value) // unit} {name})"
    return f"`{show_value(value)}`" if value != "" else "empty"


def show_value(value: object) -> str:
    """Return a setting's value as TOML has it, text without its quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)
