"""Multi-line records: which lines continue the line before them.

A line continues the one before if it is indented, if it is a part of a stack trace, or if it follows a line that opens
one (`Traceback (most recent call last):`) and has neither a time stamp nor a level of its own. The rule looks at a line
and its neighbour only, so it gives the same result wherever a batch is cut, apart from the cut itself.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quiver.spark.logs.columns import Column, Indices, fill, pa, pc
from quiver.spark.logs.parser import decode

_CONTINUES: Final = (
    r"^(?:[ \t]+\S|\s*$|at [\w.$<>/]+\(|Caused by: |Suppressed: |\.\.\. \d+ (?:more|common)|Traceback \(most"
    r" recent call|During handling of the above|The above exception was|goroutine \d+ \[|[\]})]+[,;]?\s*$)"
)
_RAISED: Final = r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit|Failure)(?::|$|\s*$)"
_FRAME: Final = r"^\s+(?:at |File \")"
_TRACE: Final = r"^(?:\s+(?:File \"|at |\^|~|raise |return )|Traceback |Caused by: |\s+\S)"


def find_continuations(lines: Column, groups: Column | None = None) -> Column:
    """Return for each line whether it continues the line before.

    `groups` names what each line belongs to, such as its source; a line never continues a line of another group.
    """
    text, _ = decode(lines)
    continues = np.asarray(pc.match_substring_regex(text, _CONTINUES))
    raised = np.asarray(pc.match_substring_regex(text, _RAISED))
    trace = np.asarray(pc.match_substring_regex(text, _TRACE))
    found = continues.copy()
    found[1:] |= raised[1:] & trace[:-1]
    found[:-1] |= raised[:-1] & np.asarray(pc.match_substring_regex(text, _FRAME))[1:]
    if len(found):
        found[0] = False
    if groups is not None and len(groups) > 1:
        same = np.asarray(fill(pc.equal(groups[1:], groups[:-1]), value=False))
        found[1:] &= same
    return pa.array(found)


def join_lines(lines: Column, groups: Column | None = None) -> tuple[Column, Indices]:
    """Join lines with their continuations; return the joined lines and the index of each one's first line."""
    continues = np.asarray(find_continuations(lines, groups))
    firsts = np.flatnonzero(~continues)
    if len(firsts) == len(lines):
        return lines, firsts
    offsets = pa.array(np.append(firsts, len(lines)), pa.int32())
    text, _ = decode(lines)
    return pc.binary_join(pa.ListArray.from_arrays(offsets, text), "\n"), firsts
