"""Durations, sizes and counts as people write them: `7d`, `36h`, `500ms`, `10GiB`, `500MB`, `50k`, `unlimited`."""

from __future__ import annotations

import re
from typing import Any, Final

import click

UNLIMITED: Final = 0
"""What `unlimited` is parsed to, where an option allows it."""

QUANTITY_MAX: Final = 1 << 53
"""Greatest quantity: a number that JSON can hold."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_MILLISECONDS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_BYTES: Final = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}

_COUNTS: Final = {"": 1, **{prefix: 1000**power for power, prefix in enumerate("kmg", 1)}}


class _QuantityType(click.ParamType[int]):
    """Parse a number with a unit; a number without one is in the base unit."""

    units: dict[str, int]
    base: str
    example: str

    def __init__(self, *, or_unlimited: bool = False) -> None:
        self._or_unlimited = or_unlimited

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002 - click's signature
        """Return the placeholder that the help shows."""
        return self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the quantity in the base unit; fail with a usage error if it is none."""
        if isinstance(value, int):
            return value
        if self._or_unlimited and value == "unlimited":
            return UNLIMITED
        match = _NUMBER.fullmatch(value.strip())
        unit = match and self.units.get(match[2].lower() or self.base)
        if not match or not unit:
            example = f"{self.example}, or unlimited" if self._or_unlimited else self.example
            self.fail(f"{value!r} is no {self.name}: give a number and a unit, such as {example}", param, ctx)
        quantity = float(match[1]) * unit
        if quantity > QUANTITY_MAX:
            self.fail(f"{value!r} is too much: the maximum is {QUANTITY_MAX} {self.base}", param, ctx)
        if round(quantity) < 1:
            self.fail(f"{value!r} is less than 1 {self.base}", param, ctx)
        return round(quantity)


class DurationType(_QuantityType):
    """Parse a duration into milliseconds."""

    name, units, base, example = "duration", _MILLISECONDS, "ms", "7d, 36h, 15m, 500ms"


class SizeType(_QuantityType):
    """Parse a size into bytes."""

    name, units, base, example = "size", _BYTES, "b", "10GiB, 500MB, 64KiB"


class CountType(_QuantityType):
    """Parse a count: 50000, 50k, 1.5M."""

    name, units, base, example = "count", _COUNTS, "", "50000, 50k, 1.5M"


def format_duration(milliseconds: int) -> str:
    """Return a duration in the largest unit up to days that divides it: 7d."""
    shown = {unit: size for unit, size in _MILLISECONDS.items() if unit != "w"}
    size, unit = max((size, unit) for unit, size in shown.items() if milliseconds % size == 0)
    return f"{milliseconds // size}{unit}"


def format_size(size_bytes: int) -> str:
    """Return a size in the largest binary unit that divides it: 10GiB."""
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    size, unit = max((size, unit) for unit, size in units.items() if size_bytes % size == 0)
    return f"{size_bytes // size}{unit}"
