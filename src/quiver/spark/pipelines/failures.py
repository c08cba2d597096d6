"""What went wrong in a job, told in Quiver's own words. Pure.

Spark wraps what a task or a planner raised into the text of an error of its own, with the traces of two languages.
What is meant is the last error of ours in it; if there is none, the last line that a Python process said.
"""

from __future__ import annotations

import re
from typing import Final

from quiver import errors
from quiver.errors import QuiverError, UnavailableError

_OURS: Final = re.compile(r"quiver\.errors\.(\w+): (.+)")
_PYTHON: Final = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception): .+$", flags=re.MULTILINE)
SENTENCE_CHARACTERS_MAX: Final = 500


def explain(error: Exception) -> QuiverError:
    """Return the error of ours that stands behind one of Spark's; nothing that a job began is lost or half done."""
    if isinstance(error, QuiverError):
        return error
    text = str(error)
    for name, sentence in reversed(_OURS.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, QuiverError):
            return kind(sentence.strip())
    said = _PYTHON.findall(text) or text.splitlines() or [type(error).__name__]
    sentence = f"Spark could not run the job: {said[-1].strip()[:SENTENCE_CHARACTERS_MAX]}"
    return UnavailableError(sentence, code="spark_failed")
