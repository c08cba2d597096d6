"""All jobs by name, and how they are made: from flags, or from a job file. Pure.

A job file is TOML: `job` names the job, every other key is one of its options, called as on the command line.

    job = "archive"
    topic = "logs"
    to = "/srv/lake"
    every = "10s"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

import msgspec

from quiver.errors import RequestError
from quiver.spark.pipelines.job import Job

JOBS: Final = {
    "analyze": "quiver.spark.pipelines.analyze:Analyze",
    "archive": "quiver.spark.pipelines.archive:Archive",
    "audit": "quiver.spark.pipelines.audit:Audit",
    "ingest": "quiver.spark.pipelines.ingest:Ingest",
    "replay": "quiver.spark.pipelines.replay:Replay",
}
"""Where each job is: the module and the struct in it. Loaded when it is run, with the libraries that it needs."""
_NAME_KEY: Final = "job"


def make_job(name: str, given: Mapping[str, Any]) -> Job:
    """Return a job with the options given, by their names; raise `RequestError` (`bad_option`) for what cannot be."""
    kind = _find(name)
    known = msgspec.structs.fields(kind)
    unknown = sorted(given.keys() - {field.encode_name for field in known})
    if unknown:
        names = ", ".join(sorted(field.encode_name for field in known))
        raise _bad(f"{name} has no option {', '.join(map(repr, unknown))}; there are {names}")
    missing = [field.encode_name for field in known if field.required and field.encode_name not in given]
    if missing:
        raise _bad(f"{name} needs {', '.join(missing)}")
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise _bad(f"an option of {name} cannot be used: {error}") from None


def job_from_file(text: str, instead: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, Job]:
    """Return the name and the job that a job file describes, but for some options; raise `RequestError` if it is none.

    Options in `instead`, by their names, come before those in the file.
    """
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"the job file is not TOML: {error}", code="bad_job_file") from None
    name = given.pop(_NAME_KEY, None)
    if not isinstance(name, str):
        raise RequestError(
            f'the job file does not say which job it is: {_NAME_KEY} = "NAME"; {_names()}', code="bad_job_file"
        )
    return name, make_job(name, {**given, **instead})


def _find(name: str) -> type[Job]:
    if name not in JOBS:
        raise RequestError(f"there is no job {name!r}; {_names()}", code="unknown_job")
    module, _, kind = JOBS[name].partition(":")
    found: type[Job] = getattr(import_module(module), kind)
    return found


def _names() -> str:
    return f"jobs are {', '.join(sorted(JOBS))}"


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
