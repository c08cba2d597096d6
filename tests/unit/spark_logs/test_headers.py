"""Headers: the layouts of common formats are found without configuration."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest

from quiver.errors import RequestError
from quiver.spark.logs import learn
from quiver.spark.logs.columns import pa

MESSAGES = (
    "accepted a connection from 10.1.2.{n}:40{n}",
    "closing the segment after {n} records",
    "waiting for the lease",
    "retry {n} of 5 failed: timeout",
    "quota reached, dropping {n} bytes",
)


def _lines(header: str, count: int = 60) -> list[tuple[str, str]]:
    """Return headers and messages. In a header, `{a|b}` is one of the choices and `{##}` a number of two digits."""
    chance = random.Random(5)

    def choose(match: re.Match[str]) -> str:
        choices = match[1].split("|")
        if match[1].strip("#"):
            return str(chance.choice(choices))
        return str(chance.randint(10 ** (len(match[1]) - 1), 10 ** len(match[1]) - 1))

    return [
        (re.sub(r"\{([^}]*)\}", choose, header), message.format(n=chance.randint(1, 99)))
        for message in (chance.choice(MESSAGES) for _ in range(count))
    ]


FORMATS: dict[str, tuple[str, dict[str, set[str]]]] = {
    "log4j": (
        "2024-05-01 10:00:1{#},123 {INFO|WARN} [pool-{#} worker] org.example.Store: ",
        {"source": {"org.example.Store"}, "level": {"INFO", "WARN"}},
    ),
    "log4j with dashes and places": (
        "2024-05-01 10:00:1{#},123 - {INFO |ERROR} [main:Store@{##}] - ",
        {"source": {"Store"}, "thread_or_pid": {"main"}, "level": {"INFO", "ERROR"}},
    ),
    "short year": (
        "24/05/01 10:00:1{#} INFO {storage.Cache|net.Server}: ",
        {"source": {"storage.Cache", "net.Server"}, "level": {"INFO"}},
    ),
    "compact date and thread number": (
        "240501 10001{#} {###} INFO dfs.Node$Receiver: ",
        {"source": {"dfs.Node$Receiver"}, "level": {"INFO"}},
    ),
    "syslog": (
        "May  1 10:00:1{#} web3 {nginx[812]|kernel|Backup Agent[7]|cron(pam)[3]}: ",
        {"host": {"web3"}, "source": {"nginx", "kernel", "Backup Agent", "cron(pam)"}},
    ),
    "syslog with several hosts": (
        "May  1 10:00:1{#} {web-a|web-17} {nginx[812]|app[1] (com.example.x)}: ",
        {"host": {"web-a", "web-17"}, "source": {"nginx", "app"}, "thread_or_pid": {"812", "1"}},
    ),
    "apache error": ("[Wed May 01 10:00:1{#} 2024] [{notice|error}] ", {"level": {"NOTICE", "ERROR"}}),
    "padded columns": (
        "2024-05-01 10:00:1{#}, Info                  {CBS|CSI}    ",
        {"level": {"INFO"}, "source": {"CBS", "CSI"}},
    ),
    "android": (
        "05-01 10:00:1{#}.811  1702  {####} {D|I|W|E} {Window|Power}: ",
        {"level": {"DEBUG", "INFO", "WARN", "ERROR"}, "source": {"Window", "Power"}, "thread_or_pid": {"1702"}},
    ),
    "label, epoch, date, two hosts and a second stamp": (
        "- 17145576{##} 2024.05.01 R0{#}-M1 2024-05-01-10.00.1{#}.675872 R02-M1 RAS {KERNEL|APP} {INFO|FATAL} ",
        {"level": {"INFO", "FATAL"}},
    ),
    "epoch in the middle": ("{######} node-{##} {unix.hw|boot} {start|state.new} 17145576{##} 1 ", {}),
    "pipes and unpadded clock": (
        "20240501-10:{#}:{#}:606|{Step_A|Step_B}|30002312|",
        {"source": {"Step_A", "Step_B"}},
    ),
    "file name, pid, level, logger and request": (
        "api.log.1.2024-05-01_10:00:08 2024-05-01 10:00:1{#}.008 {###} INFO api.wsgi [{-|req-3810 113d - - -}] ",
        {"level": {"INFO"}, "source": {"api.wsgi"}},
    ),
    "program and dash": (
        "[05.01 10:00:1{#}] {chrome.exe|chrome.exe *64|git.exe} - ",
        {"source": {"chrome.exe", "chrome.exe *64", "git.exe"}},
    ),
    "epoch, date, host and syslog": (
        "- 17145576{##} 2024.05.01 dn228 May 1 10:00:1{#} {dn228/dn228|dn9/dn9} {crond(pam)[2915]|kernel}: ",
        {"source": {"crond(pam)", "kernel"}, "host": {"dn228/dn228", "dn9/dn9", "dn228"}},
    ),
    "python": ("2024-05-01 10:00:1{#},001 - {app.db|app.web} - {INFO|ERROR} - ", {"level": {"INFO", "ERROR"}}),
    "glog": (
        "{I|W}0501 10:00:1{#}.811000  {####} store.cc:{##}] ",
        {"level": {"INFO", "WARN"}, "source": {"store.cc"}},
    ),
    "level first": ("{INFO|WARNING}: ", {"level": {"INFO", "WARNING"}}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_layout_is_found(name: str) -> None:
    """The message of each line is what follows its header, and the header's parts are in their columns."""
    header, expected = FORMATS[name]
    lines = _lines(header)
    texts = pa.array([head + message for head, message in lines])
    rows = learn(texts).parse(texts)
    assert rows.column("message").to_pylist() == [message for _, message in lines]
    for column, values in expected.items():
        found = set(rows.column(column).to_pylist())
        assert found
        assert found <= values, column
    assert rows.column("time").null_count == (len(lines) if name == "level first" else 0)
    templates = set(rows.column("template").to_pylist())
    assert "waiting for the lease" in templates
    assert len(templates) == len(MESSAGES)


def test_epoch_tells_the_zone_of_a_line_with_two_stamps() -> None:
    """Of two stamps the one that counts from 1970 is the line's time: its zone is known."""
    header, _ = FORMATS["label, epoch, date, two hosts and a second stamp"]
    texts = pa.array([head + message for head, message in _lines(header)])
    times: list[Any] = learn(texts).parse(texts).column("time").to_pylist()
    assert {time.timestamp() // 100 for time in times} == {17145576.0}


@pytest.mark.parametrize(
    "names",
    [
        ("log4j", "syslog"),
        ("log4j", "padded columns", "log4j with dashes and places"),
        ("android", "pipes and unpadded clock", "apache error"),
    ],
)
def test_formats_in_one_topic_do_not_disturb_each_other(names: tuple[str, ...]) -> None:
    """Lines of several formats, mixed, are read as each format alone is."""
    lines = [line for name in names for line in _lines(FORMATS[name][0])]
    random.Random(3).shuffle(lines)
    texts = pa.array([head + message for head, message in lines])
    rows = learn(texts).parse(texts)
    assert rows.column("message").to_pylist() == [message for _, message in lines]
    assert rows.column("time").null_count == 0


def test_format_that_changes_is_learned_again() -> None:
    """A model that learns from lines of a later format reads both formats."""
    before, after = (_lines(FORMATS[name][0]) for name in ("log4j", "syslog"))
    model = learn(pa.array([head + message for head, message in before]))
    later = pa.array([head + message for head, message in after])
    parsed = model.parser().parse(later)
    assert all(parsed.is_new.to_pylist())
    model = model.merge(learn(later))
    for lines in (before, after):
        texts = pa.array([head + message for head, message in lines])
        assert model.parse(texts).column("message").to_pylist() == [message for _, message in lines]


def test_sources_vote_on_their_own() -> None:
    """Each source has its own layouts, and a source that is not known has those of all."""
    lines = {name: [head + message for head, message in _lines(FORMATS[name][0])] for name in ("log4j", "android")}
    texts = [line for own in lines.values() for line in own]
    names = [name for name, own in lines.items() for _ in own]
    model = learn(pa.array(texts), sources=pa.array(names))
    assert set(model.layouts) == {"", "android", "log4j"}
    known = model.parse(pa.array(texts), sources=pa.array(names))
    unknown = model.parse(pa.array(texts), sources=pa.array(["other"] * len(texts)))
    assert known.column("message").to_pylist() == unknown.column("message").to_pylist()
    assert known.column("time").null_count == 0


def test_format_of_the_user_overrides() -> None:
    """A given format is tried before what was learned."""
    lines = pa.array([f"2024-05-01 10:00:0{n} <web> user{n}# said hello" for n in range(5)])
    model = learn(lines, formats=["{time} <{source}> {thread}# {message}"])
    rows = model.parse(lines)
    assert rows.column("source").to_pylist() == ["web"] * 5
    assert rows.column("thread_or_pid").to_pylist() == [f"user{n}" for n in range(5)]
    assert set(rows.column("message").to_pylist()) == {"said hello"}


@pytest.mark.parametrize(
    "text", ["{time} {level}", "{when} {message}", "{level} {level} {message}", "{time:x} {message}"]
)
def test_bad_format_is_an_error(text: str) -> None:
    """An unknown field, one that is there twice, and a missing message are told."""
    with pytest.raises(RequestError, match="the format is not valid"):
        learn(pa.array(["x"]), formats=[text])


def test_message_that_begins_with_a_level_has_it() -> None:
    """Where the header has no level, the message's first word counts, and stays in the message."""
    lines = pa.array(
        [f"May  1 10:00:0{n} web app[1]: {text}" for n, text in enumerate(("error: gone", "fine", "all ok", "no"))]
    )
    rows = learn(lines).parse(lines)
    assert rows.column("level").to_pylist() == ["ERROR", None, None, None]
    assert rows.column("message")[0].as_py() == "error: gone"


def test_program_whose_name_begins_with_a_digit() -> None:
    """Programs before a dash are the source, whatever they begin with and whether they have a suffix."""
    programs = ["mail.exe", "7up.exe", "web.exe *64", "chat.exe"]
    texts = ["opened", "closed after 3 tries", "refused by rule", "failed : no route", "waits", "retries"]
    pairs = list(itertools.product(programs, texts))
    lines = pa.array(
        [f"[10.30 16:{n:02d}:06] {own} - host{n}.example:80 {text}" for n, (own, text) in enumerate(pairs)]
    )
    rows = learn(lines).parse(lines)
    assert rows.column("source").to_pylist() == [own for own, _ in pairs]
    assert len(set(rows.column("template").to_pylist())) == len(texts)
