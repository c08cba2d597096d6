"""Mask what varies by its looks: numbers, addresses, ids and paths, for a whole column of texts at once.

A text is made of words, which white space separates, and words of chunks, which white space and the marks
`= , ; ( ) [ ] { } < > | " '` separate. A colon separates too, unless a path follows or the chunk had a digit or a dot
before it: so an address with its port stays one chunk, and `state:7` becomes two. A chunk that has a digit, or looks
like a path or a mail address, is a *run*: it is variable. Masking puts one byte, `MASK`, in the place of each run and
keeps every other byte. Texts with the same masked form are equal but for their runs.

Everything here is arithmetic on the bytes of the column: there is no loop over texts.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from quiver.spark.logs.columns import Bytes, Column, Flags, Indices, pa, pc, slices, text_of

MASK: Final = "\x01"
"""What a masked text has in the place of a run. It is a run itself, so masking twice is safe."""
MARKS: Final = "=,;()[]{}<>|\"'"
TEXT_BYTES_MAX: Final = 2560
"""So many bytes of a text's first line are looked at."""
LEADERS_MIN: Final = 3
"""So many dots separate."""
_SPACE, _MARK, _COLON, _OTHER, _DOT, _SLASH, _AT, _DIGIT = range(8)
_CONTINUATION_BYTES_MAX: Final = 3
_MASK_BYTE: Final = ord(MASK)
_ENDING: Final = (pa.scalar(b"", pa.large_binary()), pa.scalar(b"\n", pa.large_binary()))


def _classes() -> Bytes:
    classes = np.full(256, _OTHER, np.uint8)
    classes[[ord(character) for character in " \t\r\n\v\f"]] = _SPACE
    classes[[ord(character) for character in MARKS]] = _MARK
    classes[ord("0") : ord("9") + 1] = _DIGIT
    classes[_MASK_BYTE] = _DIGIT
    for kind, characters in ((_COLON, ":"), (_DOT, "."), (_SLASH, "/\\"), (_AT, "@")):
        classes[[ord(character) for character in characters]] = kind
    return classes


_CLASSES: Final = _classes()


class Masked(msgspec.Struct):
    """A column of masked texts, and where their runs are in the original."""

    forms: Column
    """The masked texts."""
    text: Bytes
    anchors: Indices
    """For each text, where it starts and where each of its runs starts and ends in `text`."""
    firsts: Indices
    """For each text, the index of its first anchor."""

    def place(self, rows: Indices, anchor: Indices, delta: Indices) -> Indices:
        """Return places in `text`: so many bytes after an anchor of a row.

        Between runs the lines of a form are equal. Runs are not: a place in one is at most its end, and no place is
        within a character.
        """
        anchors = self.firsts[rows] + anchor
        found: Indices = self.anchors[anchors] + delta
        inside = np.flatnonzero((anchor % 2 == 1) & (delta > 0))
        if len(inside):
            ends = self.anchors[anchors[inside] + 1]
            places = np.minimum(found[inside], ends)
            for _ in range(_CONTINUATION_BYTES_MAX):
                places += (places < ends) & (self.text[np.minimum(places, len(self.text) - 1)] & 0xC0 == 0x80)
            found[inside] = places
        return found


def mask(texts: Column) -> Masked:
    """Mask the first line of each text of a string or binary column without nulls."""
    ended = pc.binary_join_element_wise(texts.cast(pa.large_binary()), *_ENDING)
    text, bounds = text_of(ended)
    starts, ends = _first_lines(ended, text, bounds)
    run_starts, run_ends = find_runs(text)
    inside = None if (ends == bounds[1:] - 1).all() else _within(run_starts, run_ends, starts, ends)
    if inside is not None:
        run_starts, run_ends = run_starts[inside], run_ends[inside]
    firsts = np.searchsorted(run_starts, starts)
    counts = np.diff(firsts, append=len(run_starts))
    anchor_firsts = np.arange(len(starts)) + 2 * firsts
    anchors = np.empty(len(starts) + 2 * len(run_starts), np.int64)
    anchors[anchor_firsts] = starts
    places = np.arange(len(run_starts)) * 2 + np.repeat(np.arange(len(starts)), counts) + 1
    anchors[places], anchors[places + 1] = run_starts, run_ends
    return Masked(_forms(text, starts, ends, run_starts, run_ends, firsts), text, anchors, anchor_firsts)


def _first_lines(ended: Column, text: Bytes, bounds: Indices) -> tuple[Indices, Indices]:
    """Return the bounds of what is looked at of each text."""
    starts, ends = bounds[:-1], bounds[1:] - 1
    if len(starts) and int((text == ord("\n")).sum()) > len(starts):
        ends = starts + np.asarray(pc.find_substring(ended, b"\n"))
    if len(starts) and int((ends - starts).max()) > TEXT_BYTES_MAX:
        ends = ends.copy()
        for row in np.flatnonzero(ends - starts > TEXT_BYTES_MAX):  # few are so long
            start = starts[row]
            ends[row] = start + _end_of_words(text[start : start + TEXT_BYTES_MAX].tobytes())
    return starts, ends


def _end_of_words(text: bytes) -> int:
    """Return where the last whole word ends; a text without blanks is cut at a character."""
    end = text.rfind(b" ")
    return end if end > 0 else len(text.decode(errors="ignore").encode())


def first_line(text: bytes) -> bytes:
    """Return what is looked at of a text."""
    line, _, _ = text.partition(b"\n")
    return line[: _end_of_words(line[:TEXT_BYTES_MAX])] if len(line) > TEXT_BYTES_MAX else line


def _within(run_starts: Indices, run_ends: Indices, starts: Indices, ends: Indices) -> Flags:
    """Return which runs are in what is looked at."""
    row = np.searchsorted(starts, run_starts, side="right") - 1
    found: Flags = run_ends <= ends[row]
    return found


def find_runs(text: Bytes) -> tuple[Indices, Indices]:
    """Return the bounds of the runs of a text."""
    classes = _CLASSES[text]
    _separate_leaders(classes)
    in_chunk = classes >= _OTHER
    colons = np.flatnonzero(classes == _COLON)
    if len(colons):
        _keep_colons(text, classes, in_chunk, colons)
    edges = np.flatnonzero(in_chunk[1:] != in_chunk[:-1]) + 1
    if len(text) and in_chunk[0]:
        edges = np.concatenate(([0], edges))
    if len(edges) % 2:
        edges = np.append(edges, len(text))
    starts, ends = edges[0::2], edges[1::2]
    if not len(starts):
        return starts, ends
    is_run = np.maximum.reduceat(classes, starts) == _DIGIT
    _add_paths(classes, starts, ends, is_run)
    return starts[is_run], ends[is_run]


def _separate_leaders(classes: Bytes) -> None:
    """Make dots separate where three or more lead from a name to its value, as in `depth.....1`."""
    dots = np.flatnonzero(classes == _DOT)
    if len(dots) < LEADERS_MIN:
        return
    firsts = np.flatnonzero(np.diff(dots, prepend=-2) != 1)
    sizes = np.diff(firsts, append=len(dots))
    if sizes.max() >= LEADERS_MIN:
        classes[dots[np.repeat(sizes, sizes) >= LEADERS_MIN]] = _MARK


def _keep_colons(text: Bytes, classes: Bytes, in_chunk: Flags, colons: Indices) -> None:
    """Put the colons that do not separate into their chunks."""
    after = classes[np.minimum(colons + 1, len(text) - 1)]
    before = classes[np.maximum(colons - 1, 0)]
    in_chunk[colons[after == _SLASH]] = True
    joins = (before >= _OTHER) & (after >= _COLON)
    candidates = colons[joins]
    if not len(candidates):
        return
    limits = np.flatnonzero(classes <= _MARK)
    first = np.searchsorted(limits, candidates) - 1
    starts = np.where(first >= 0, limits[np.maximum(first, 0)] + 1, 0)
    marked = np.flatnonzero((classes == _DIGIT) | (classes == _DOT))
    if not len(marked):
        return
    last = np.searchsorted(marked, candidates) - 1
    has_mark = (last >= 0) & (marked[np.maximum(last, 0)] >= starts)
    in_chunk[candidates[has_mark]] = True


def _add_paths(classes: Bytes, starts: Indices, ends: Indices, is_run: Flags) -> None:
    """Mark chunks that are absolute paths, URLs or mail addresses."""
    slashes = np.flatnonzero(classes == _SLASH)
    if len(slashes):
        chunk = np.searchsorted(starts, slashes, side="right") - 1
        count = np.bincount(chunk, minlength=len(starts))
        is_first = classes[starts] == _SLASH
        is_run |= (count > 1) | (is_first & (ends - starts > 1))
    ats = np.flatnonzero(classes == _AT)
    if len(ats):
        chunk = np.searchsorted(starts, ats, side="right") - 1
        is_run[chunk[(ats > starts[chunk]) & (ats < ends[chunk] - 1)]] = True


def _forms(
    text: Bytes, starts: Indices, ends: Indices, run_starts: Indices, run_ends: Indices, firsts: Indices
) -> Column:
    """Return the texts with each run replaced by one byte: the pieces between the runs, one after the other."""
    count, runs = len(starts), len(run_starts)
    masked = text.copy()
    masked[run_ends - 1] = _MASK_BYTE
    counts = np.diff(firsts, append=runs)
    # A text of n runs has n + 1 pieces; each but the first begins with the byte that stands for the run before it.
    lefts, rights = np.empty(count + runs, np.int64), np.empty(count + runs, np.int64)
    piece_firsts = np.arange(count) + firsts
    places = np.arange(runs) + np.repeat(np.arange(count), counts)
    lefts[piece_firsts], lefts[places + 1] = starts, run_ends - 1
    rights[piece_firsts + counts], rights[places] = ends, run_starts
    pieces = slices(masked, lefts, rights, pa.large_binary())
    _, _, data = pieces.buffers()
    bounds = np.zeros(count + 1, np.int64)
    sizes = np.zeros(count + runs + 1, np.int64)
    np.cumsum(rights - lefts, out=sizes[1:])
    bounds[:-1], bounds[-1] = sizes[piece_firsts], sizes[-1]
    return pa.Array.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(bounds), data or pa.py_buffer(b"")])
