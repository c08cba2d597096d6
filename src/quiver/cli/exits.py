"""Exit codes: one for each class of error, with the advice that is printed for it.

The codes are part of the interface (`docs/operations/install.md` lists them); scripts depend on them. The table is
searched from the most specific class up, so that every error of `quiver.errors` has an entry.
"""

from __future__ import annotations

import traceback

import click

from quiver.errors import (
    ConfigError,
    DamageError,
    InvariantBroken,
    OutcomeUnknownError,
    QuiverError,
    RequestError,
    StorageError,
    UnavailableError,
)

DONE = 0
FOUND = 1
USAGE = 2
UNAVAILABLE = 3
STORAGE = 4
UNKNOWN = 5
DEFECT = 70
INTERRUPTED = 130
PIPE_CLOSED = 141

_EXITS: dict[type[BaseException], tuple[int, str]] = {
    DamageError: (FOUND, "restore the directory from another replica; do not start a node on the damaged one"),
    RequestError: (USAGE, "correct the request and run the command again"),
    ConfigError: (USAGE, "correct the setting; `quiver config docs` lists all settings"),
    UnavailableError: (UNAVAILABLE, "nothing was done; run the command again later"),
    StorageError: (STORAGE, "check the disk, its free space and its permissions"),
    OutcomeUnknownError: (UNKNOWN, "the request may have been done: check before you run the command again"),
    OSError: (STORAGE, "check the path, its permissions and the disk"),
}
_DEFECT = (DEFECT, "this is a defect of Quiver: report it, with the command that led to it")


def report(error: BaseException) -> int:
    """Print the error and what to do about it on standard error; return the exit code."""
    code, advice = next((_EXITS[kind] for kind in type(error).__mro__ if kind in _EXITS), _DEFECT)
    click.echo(f"error {_name(error)}: {_sentence(error)}", err=True)
    click.echo(f"  what to do: {advice}", err=True)
    return code


def _name(error: BaseException) -> str:
    if isinstance(error, QuiverError):
        return error.code
    return "system_error" if isinstance(error, OSError) else "defect"


def _sentence(error: BaseException) -> str:
    if isinstance(error, QuiverError | InvariantBroken):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
