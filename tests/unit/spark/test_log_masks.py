"""Masks look at the first line of a text only, also at that of the last text."""

from __future__ import annotations

import pyarrow as pa
import pytest

from quiver.spark.logs.tokens import mask


@pytest.mark.parametrize("texts", [["a 1\nb 2 3 4"], ["x", "a 1\nb 2 3 4 5 6"], ["a 1\n\n7 8 9"]])
def test_what_follows_the_first_line_of_the_last_text_is_not_masked(texts: list[str]) -> None:
    forms = mask(pa.array(texts)).forms
    forms.validate(full=True)
    assert forms[-1].as_py() == b"a \x01"
