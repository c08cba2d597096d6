"""Properties of learning and parsing, on lines that Hypothesis makes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.spark.logs import SCHEMA, Model, learn
from quiver.spark.logs.columns import pa

WORDS = st.sampled_from(("open", "close", "user", "anna", "7", "10.0.0.1", "x=5", "[a]", "FAILED", "/var/a", "ok:"))
MESSAGES = st.lists(WORDS, max_size=5).map(" ".join)
LINES = st.builds(
    lambda header, message: header + message,
    st.sampled_from(
        [
            "2024-05-01 10:00:00,123 INFO [main] a.b.Store: ",
            "2024-05-02 11:00:00,123 WARN [main] a.b.Store: ",
            "May  1 10:00:00 web app[7]: ",
            "",
        ]
    ),
    MESSAGES,
)
BATCHES = st.lists(LINES, max_size=25)


def _learn(lines: list[str]) -> Model:
    return learn(pa.array(lines, pa.string()))


@settings(max_examples=40, deadline=None)
@given(BATCHES, BATCHES, BATCHES)
def test_merging_is_associative_and_commutative(one: list[str], two: list[str], three: list[str]) -> None:
    """However models are merged, the result has the same forms, templates and layouts."""
    a, b, c = _learn(one), _learn(two), _learn(three)
    shown = {template for model in (a, b, c) for template in model.templates}
    left, right, turned = a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b)
    assert left == right == turned == _learn(one + two + three)
    assert left.templates == right.templates == turned.templates
    assert left.layouts == right.layouts == turned.layouts
    for template in shown:
        for merged in (left, right, turned):
            assert merged.resolve(template)
            assert set(merged.resolve(template)) <= set(merged.templates)


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.randoms(use_true_random=False), st.integers(1, 5))
def test_ids_depend_neither_on_order_nor_on_partitions(lines: list[str], chance: object, parts: int) -> None:
    """Shuffled and partitioned lines get the ids that they get in one batch."""
    rows = _learn(lines).parse(pa.array(lines, pa.string()))
    expected = dict(zip(lines, rows.column("template_id").to_pylist(), strict=True))
    shuffled = list(lines)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    model = _learn([])
    for part in range(parts):
        model = model.merge(_learn(shuffled[part::parts]))
    model = Model.from_bytes(model.to_bytes())
    for part in range(parts):
        own = shuffled[part::parts]
        found = model.parse(pa.array(own, pa.string())).column("template_id").to_pylist()
        assert found == [expected[line] for line in own]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=60), LINES.map(str.encode), st.none()), max_size=12))
def test_parse_is_total(lines: list[bytes | None]) -> None:
    """Any bytes give one row each, with a template, and the line itself."""
    column = pa.array(lines, pa.binary())
    for model in (learn(column), _learn(["2024-05-01 10:00:00,123 INFO [main] a.b.Store: user 7"] * 4), Model()):
        rows = model.parse(column)
        assert rows.schema == SCHEMA
        assert rows.num_rows == len(lines)
        rows.validate(full=True)
        for name in ("template_id", "template", "parameters", "message", "line"):
            assert rows.column(name).null_count == 0
        for line, row in zip(lines, rows.to_pylist(), strict=True):
            assert (row["raw"] if row["raw"] is not None else row["line"].encode()) == (line or b"")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="ab1 .:=/\\@[]\n|,\x01é", max_size=30), min_size=1, max_size=8))
def test_slices_of_a_column_parse_alike(lines: list[str]) -> None:
    """A column that is a slice of a larger one gives the same rows as its copy."""
    model = _learn(lines)
    whole = model.parse(pa.array(lines))
    sliced = model.parse(pa.array(["x 1", *lines, "y"]).slice(1, len(lines)))
    assert whole.equals(sliced)
