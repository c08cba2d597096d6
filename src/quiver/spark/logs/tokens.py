"""Mask what varies by its looks: numbers, addresses, ids and paths, for a whole column of texts at once.

A text is made of words, which white space separates, and words of chunks, which white space and the marks
`= , ; ( ) [ ] { } < > | " '` separate. A colon separates too, unless a path follows or the chunk had a digit before it:
so an address with its port stays one chunk, and `state:7` becomes two. A chunk that has a digit or looks like a path is
variable. Masking puts one byte, `MASK`, in the place of each variable chunk and keeps every other byte.

Everything here is arithmetic on the bytes of the column: there is no loop over texts.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from quiver.spark.logs.columns import Bytes, Flags, Indices

MASK: Final = "\x01"
"""What a masked text has in the place of a variable chunk. It is a variable chunk itself, so masking twice is safe."""
MARKS: Final = "=,;()[]{}<>|\"'"
_SPACE, _MARK, _DIGIT, _COLON, _OTHER = 0, 1, 2, 3, 4
_MASK_BYTE: Final = ord(MASK)


def _classes() -> Bytes:
    classes = np.full(256, _OTHER, np.uint8)
    classes[[ord(character) for character in " \t\r\n\v\f"]] = _SPACE
    classes[[ord(character) for character in MARKS]] = _MARK
    classes[ord("0") : ord("9") + 1] = _DIGIT
    classes[_MASK_BYTE] = _DIGIT
    classes[ord(":")] = _COLON
    return classes


_CLASSES: Final = _classes()
_SLASH, _BACKSLASH = ord("/"), ord("\\")


class Masked(msgspec.Struct):
    """A column of masked texts, and where their words and variable chunks are in the original."""

    text: Bytes
    bounds: Indices
    word_starts: Indices
    word_ends: Indices
    word_firsts: Indices
    """Index of each text's first word, and the number of all words."""
    run_starts: Indices
    run_ends: Indices
    run_firsts: Indices
    """Index of each text's first variable chunk, and the number of all."""


def mask(text: Bytes, bounds: Indices) -> Masked:
    """Mask the texts that lie one after the other in `text`."""
    classes = _CLASSES[text]
    first = np.zeros(len(text) + 1, np.bool_)
    first[bounds] = True
    word_starts, word_ends = _spans(classes != _SPACE, first)
    in_chunk = classes >= _DIGIT
    digits = np.zeros(len(text) + 1, np.int32)
    np.cumsum(classes == _DIGIT, out=digits[1:])
    _split_at_colons(text, classes, in_chunk, first, digits)
    starts, ends = _spans(in_chunk, first)
    variable = (digits[ends] > digits[starts]) | _is_path(text, starts, ends)
    starts, ends = starts[variable], ends[variable]
    # A byte is inside a variable chunk where more chunks have started than ended.
    depth = np.zeros(len(text) + 1, np.int8)
    depth[starts] = 1
    depth[ends] -= 1
    inside = np.cumsum(depth[:-1], dtype=np.int8).view(np.bool_) if len(text) else np.zeros(0, np.bool_)
    keep = ~inside
    keep[starts] = True
    masked = text.copy()
    masked[starts] = _MASK_BYTE
    sums = np.zeros(len(text) + 1, np.int64)
    np.cumsum(keep, out=sums[1:])
    return Masked(
        text=masked[keep],
        bounds=sums[bounds],
        word_starts=word_starts,
        word_ends=word_ends,
        word_firsts=np.searchsorted(word_starts, bounds),
        run_starts=starts,
        run_ends=ends,
        run_firsts=np.searchsorted(starts, bounds),
    )


def _spans(inside: Flags, first: Flags) -> tuple[Indices, Indices]:
    """Return the bounds of runs of true values; a run ends where a text begins."""
    if not len(inside):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    starts = inside.copy()
    starts[1:] &= ~inside[:-1] | first[1:-1]
    ends = inside.copy()
    ends[:-1] &= ~inside[1:] | first[1:-1]
    return np.flatnonzero(starts), np.flatnonzero(ends) + 1


def _split_at_colons(
    text: Bytes,
    classes: Bytes,
    in_chunk: Flags,
    first: Flags,
    digits: npt.NDArray[np.int32],
) -> None:
    """Take the colons that separate out of the chunks."""
    colons = np.flatnonzero(classes == _COLON)
    if not len(colons):
        return
    starts, _ = _spans(in_chunk, first)
    start = starts[np.searchsorted(starts, colons, side="right") - 1]
    after = text[np.minimum(colons + 1, len(text) - 1)]
    is_mark = (digits[colons] == digits[start]) & (after != _SLASH) & (after != _BACKSLASH)
    in_chunk[colons[is_mark]] = False


def _is_path(text: Bytes, starts: Indices, ends: Indices) -> Flags:
    """Tell which chunks are absolute paths or URLs."""
    if not len(starts):
        return np.zeros(0, np.bool_)
    slashes = np.zeros(len(text) + 1, np.int32)
    np.cumsum((text == _SLASH) | (text == _BACKSLASH), out=slashes[1:])
    count = slashes[ends] - slashes[starts]
    second = text[np.minimum(starts + 1, len(text) - 1)]
    is_path: Flags = ((text[starts] == _SLASH) & (ends - starts > 1) & (second != _SLASH)) | (count > 1)
    return is_path
