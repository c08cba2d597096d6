"""The history as a file: recording it from many threads, reading it back, and refusing what is none."""

from __future__ import annotations

import ast
import io
import sys
import threading
from pathlib import Path

import pytest
from history_script import Script

from quiver.testing import history as history_package
from quiver.testing.history import HistoryError, Recorder, check_history, parse_history


def test_recorded_history_reads_back() -> None:
    stream = io.StringIO()
    recorder = Recorder(stream, now_ns=iter(range(100)).__next__)
    recorder.note("r", "assign", "t-0", 0)
    call = recorder.invoke("p", "send", None, ["ä\n", "b"])
    call.ok(0, key="t-0")
    recorder.invoke("p", "send", "t-0", ["c"]).fail("busy")
    recorder.invoke("p", "send", "t-0", ["d"]).info()
    recorder.note("p", "crash")
    events = list(parse_history(io.StringIO(stream.getvalue())))
    assert [event.i for event in events] == list(range(8)) == [event.t_ns for event in events]
    assert [(event.type, event.key) for event in events[1:3]] == [("invoke", None), ("ok", "t-0")]
    assert events[1].value == ["ä\n", "b"]
    assert check_history(events).facts["sends_ok"] == 1


def test_call_has_one_outcome() -> None:
    call = Recorder(io.StringIO()).invoke("p", "poll", "t-0")
    call.info()
    with pytest.raises(RuntimeError, match="outcome already"):
        call.ok([])


def test_threads_share_a_recorder() -> None:
    stream = io.StringIO()
    recorder = Recorder(stream)

    def work(proc: str) -> None:
        for i in range(200):
            recorder.invoke(proc, "send", proc, [f"{proc}-{i}"]).ok(i)

    threads = [threading.Thread(target=work, args=(f"p{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = list(parse_history(io.StringIO(stream.getvalue())))
    assert len(events) == recorder.count == 3200
    result = check_history(events)
    assert result.is_clean, result


def test_torn_last_line_is_skipped() -> None:
    stream = io.StringIO()
    Recorder(stream).note("r", "assign", "t-0", 0)
    torn = stream.getvalue() + stream.getvalue()[:20]
    assert len(list(parse_history(io.StringIO(torn)))) == 1


@pytest.mark.parametrize("line", ["{\n", "[]\n", '{"i": 0}\n', "\n"])
def test_line_that_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(HistoryError, match="line 1"):
        list(parse_history([line]))


def test_outcome_without_a_beginning_is_refused() -> None:
    script = Script()
    script.end("p", "poll", value=[])
    with pytest.raises(HistoryError, match="did not begin"):
        script.check()


def test_process_that_does_two_things_at_a_time_is_refused() -> None:
    script = Script()
    script.begin("p", "poll")
    script.begin("p", "poll")
    with pytest.raises(HistoryError, match="before its poll ended"):
        script.check()


def test_unknown_call_is_refused() -> None:
    script = Script()
    script.begin("p", "juggle")
    with pytest.raises(HistoryError, match="no call"):
        script.check()


def test_value_sent_twice_is_refused() -> None:
    script = Script()
    script.send("p", "a", 0)
    script.send("p", "a", 1)
    with pytest.raises(HistoryError, match="sent twice"):
        script.check()


def test_events_out_of_order_are_refused() -> None:
    script = Script()
    script.note("r", "assign", 0)
    script.note("r", "assign", 1)
    script.events.reverse()
    with pytest.raises(HistoryError, match="follows"):
        script.check()


def test_many_anomalies_are_counted_and_a_few_shown() -> None:
    script = Script()
    script.poll("r", 0, " ".join(f"v{i}" for i in range(100)))
    result = script.check()
    assert result.counts["unexpected"] == 100
    assert len(result.anomalies) == 20
    assert "unexpected" in str(result)
    assert result.to_json()["anomalies"][0] == {
        "name": "unexpected",
        "key": "t-0",
        "offset": 0,
        "value": "v0",
        "event": 1,
    }


def test_history_checker_imports_nothing_of_what_it_checks() -> None:
    folder = Path(history_package.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert not node.level, path
                names = [node.module or ""]
            for name in names:
                is_own = name.startswith("quiver.testing.history.")
                assert is_own or name.split(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"
