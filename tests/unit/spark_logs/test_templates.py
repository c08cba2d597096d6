"""Templates: what is constant in messages and what varies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from quiver.spark.logs import learn
from quiver.spark.logs.columns import pa
from quiver.spark.logs.tokens import mask


def _templates(messages: list[str]) -> list[str]:
    lines = pa.array([f"2024-05-01 10:00:00 INFO app.Main: {message}" for message in messages])
    rows: Any = learn(lines).parse(lines)
    assert rows.column("message").to_pylist() == messages
    found: list[str] = rows.column("template").to_pylist()
    return found


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("took 12 ms", "took * ms"),
        ("from 10.0.0.1:50010 to /10.0.0.2", "from * to *"),
        ("size=12, free:7", "size=*, free:*"),
        ("db.example.org:5432 is up", "* is up"),
        ("read /var/log/app and C:\\temp\\x", "read * and *"),
        ("see http://example.org/a", "see *"),
        ("mail to anna@example.org", "mail to *"),
        ("blk_-123 of task_2_m_1", "* of *"),
        ("state:idle and/or busy", "state:idle and/or busy"),
        ("call(a, 'b', [c])", "call(a, 'b', [c])"),
        ("call(1, '2', [3])", "call(*, '*', [*])"),
        ("größer als 5 µs", "größer als * µs"),
        ("", ""),
        ("first 1\nsecond 2", "first *"),
        ("was \x01 here", "was * here"),
    ],
)
def test_masking(text: str, masked: str) -> None:
    """Numbers, addresses, ids, paths and mail addresses are masked; words and marks stay."""
    assert [own.decode().replace("\x01", "*") for own in mask(pa.array([text])).forms.to_pylist()] == [masked]


def test_long_text_is_cut_at_a_word() -> None:
    """Only the beginning of a long text counts."""
    (form,) = mask(pa.array(["word " * 2000])).forms.to_pylist()
    assert form.endswith(b"word")
    assert len(form) < 3000


def test_names_vary_and_kinds_do_not() -> None:
    """A column with many different words is variable, one with a few tells kinds of messages apart."""
    names = ["anna", "berta", "carl", "dora", "emil"]
    messages = [f"session opened for user {name}" for name in names]
    messages += ["link is up", "link is down", "cache warmed up"]
    assert set(_templates(messages)) == {
        "session opened for user <*>",
        "link is up",
        "link is down",
        "cache warmed up",
    }


def test_values_elsewhere_are_values_here() -> None:
    """Few names after a word are variable if many vary after the same word in another message."""
    names = ["anna", "berta", "carl", "dora", "emil"]
    messages = [f"session closed for user {name}" for name in names]
    messages += [f"session opened for user {name} on port {port}" for port, name in enumerate(names[:2])]
    assert set(_templates(messages)) == {
        "session closed for user <*>",
        "session opened for user <*> on port <*>",
    }


def test_masked_value_shows_that_a_word_varies() -> None:
    """A host without digits belongs to the template of hosts with digits."""
    messages = ["lost peer node17 of the ring", "lost peer gateway of the ring"]
    assert _templates(messages) == ["lost peer <*> of the ring"] * 2


def test_states_are_kinds() -> None:
    """Words in capitals are names of states."""
    states = ["NEW", "ASSIGNED", "RUNNING", "DONE", "FAILED"]
    messages = [f"task moved from {one} to {two}" for one, two in itertools.pairwise(states)]
    assert sorted(_templates(messages)) == sorted(messages)


@pytest.mark.parametrize(
    ("messages", "template"),
    [
        (
            ["connected at Mon Jul 25 23:24:09 2005 ok", "connected at Sun Jun 5 03:04:09 2005 ok"],
            "connected at <*> ok",
        ),
        (["size 281.6 KB, free 3.1 GB", "size 12 B, free 4 KB"], "size <*>, free <*>"),
        (["lifetime <1 sec", "lifetime 00:02"], "lifetime <*>"),
        (["delete blk_1 blk_2 blk_3 now", "delete blk_7 now"], "delete <*> now"),
        (["peers [10.0.0.1, 10.0.0.2]", "peers [10.0.0.9]"], "peers [<*>]"),
    ],
)
def test_dates_quantities_and_lists_are_one_value(messages: list[str], template: str) -> None:
    """Values of several words are drawn together, whatever their number."""
    assert _templates(messages) == [template] * 2


def test_parameters_are_cut_from_the_message() -> None:
    """Parameters are the parts of the message that the template leaves out, in order."""
    names = ["anna", "berta", "carl", "dora", "emil"]
    messages = [
        f"user={name} from 10.0.0.{n} at Mon Jul 2{n} 10:00:00 2024 moved {n}.5 KB, done"
        for n, name in enumerate(names)
    ]
    lines = pa.array([f"2024-05-01 10:00:00 INFO app.Main: {message}" for message in messages])
    rows = learn(lines).parse(lines)
    assert set(rows.column("template").to_pylist()) == {"user=<*> from <*> at <*> moved <*>, done"}
    assert rows.column("parameters")[3].as_py() == ["dora", "10.0.0.3", "Mon Jul 23 10:00:00 2024", "3.5 KB"]


def test_template_and_parameters_give_the_message_back() -> None:
    """Filling the parameters into the template gives the message, up to its blanks."""
    messages = [f"moved {n} of {n * 7} parts (disk={n}) to /data/{n}" for n in range(20)]
    lines = pa.array([f"2024-05-01 10:00:00 INFO app.Main: {message}" for message in messages])
    for row in learn(lines).parse(lines).to_pylist():
        text = row["template"]
        for value in row["parameters"]:
            text = text.replace("<*>", value, 1)
        assert text == row["message"]


def test_stars_stand_for_unknown_values() -> None:
    """A list is one value, whichever of its values are starred out."""
    messages = ["speeds ( 12 **** 14 )", "speeds ( **** 13 14 )", "speeds ( **** **** **** )", "speeds ( 1 2 3 )"]
    assert set(_templates(messages)) == {"speeds ( <*> )"}


def test_values_of_several_names_do_not_tell_kinds_apart() -> None:
    """Messages that differ after several equals signs have values there, however few different words there are."""
    pairs = itertools.product(("disk", "tape"), ("full", "empty"), ("null", "Owner{7}"))
    messages = [f"mounted kind={kind}, fill={fill}, by={owner}, tries=3" for kind, fill, owner in pairs]
    assert set(_templates(messages)) == {"mounted kind=<*>, fill=<*>, by=<*>, tries=<*>"}
    glued = [f"ready=true,door={door},lamp={lamp},step=4" for door in ("open", "shut") for lamp in ("red", "blue")]
    assert len(set(_templates(glued))) == 1


def test_one_name_may_tell_kinds_apart() -> None:
    """Two words after a single equals sign are no evidence of a value."""
    assert len(set(_templates(["stopped with mode=fast", "stopped with mode=slow"]))) == 2


@pytest.mark.parametrize(
    ("words", "template"),
    [
        (("true", "false"), "door of garage is open: <*>"),
        (('"main.Pump"', '"main.Lamp"'), 'door of garage is open: "<*>"'),
        (("(left)", "(right)"), "door of garage is open: (<*>)"),
        (("org.example.store", "net.sample.cash"), "door of garage is open: <*>"),
        (("StoreKeeper", "cashDesk"), "door of garage is open: <*>"),
    ],
)
def test_values_by_their_looks(words: tuple[str, str], template: str) -> None:
    """Literals, what is enclosed, names of classes and dotted names are values, even if there are only two."""
    assert set(_templates([f"door of garage is open: {word}" for word in words])) == {template}


@pytest.mark.parametrize("words", [("left", "right"), ("lamp.state.ON", "lamp.state.OFF"), ("OPEN", "SHUT")])
def test_kinds_by_their_looks(words: tuple[str, str]) -> None:
    """Plain words, and names that differ in their last part only, tell kinds apart if there are few."""
    assert len(set(_templates([f"door of garage is now {word}" for word in words]))) == 2


def test_few_names_of_users_are_values() -> None:
    """What follows the word for a user or a host is its name."""
    messages = [f"session {state} for user {name}" for state in ("opened", "closed") for name in ("anna", "carl")]
    assert set(_templates(messages)) == {"session opened for user <*>", "session closed for user <*>"}


def test_quoted_verbs_in_capitals_are_kinds() -> None:
    """A quote before a word in capitals does not hide that it is one."""
    verbs = ("GET", "PUT", "POST", "HEAD", "DELETE")
    assert len(set(_templates([f'10.0.0.1 "{verb} /a/b HTTP/1.1" status: 200 len: 7' for verb in verbs]))) == 5


def test_names_of_masked_values_are_no_values() -> None:
    """That a number varies after a name does not make the name a value."""
    messages = [f"cache {name}={value}" for name in ("size", "free") for value in (1, 2)]
    assert set(_templates(messages)) == {"cache size=<*>", "cache free=<*>"}


def test_programs_with_their_processes_are_values() -> None:
    """A name with a number in brackets is one value, and so is what follows an equals sign and has a number."""
    messages = [f"box: {own}(12) denied read" for own in ("mail", "chat")]
    messages += [f"log taken, reason = {own}:code:5" for own in ("lost", "denied")]
    assert set(_templates(messages)) == {"box: <*> denied read", "log taken, reason = <*>"}


def test_dots_that_lead_to_a_value_separate_it() -> None:
    """The name before the dots stays a word."""
    messages = [f"{name}{value}" for name in ("wait enable.....", "wait order......") for value in (0, 1)]
    assert set(_templates(messages)) == {"wait enable.....<*>", "wait order......<*>"}
