"""`quiver work` without a cluster: the function that it is to run is found, or the user is told why not."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from quiver.cli.work import Patience, load_function


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work_tasks.py").write_text("class Mail:\n    @staticmethod\n    def send(job):\n        return 7\n")
    (tmp_path / "work_broken.py").write_text("raise RuntimeError('no configuration')\n")
    (tmp_path / "work_importing.py").write_text("import work_missing_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_function_of_the_current_directory_is_found() -> None:
    assert load_function("work_tasks:Mail.send")(None) == 7


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("work_tasks", "is no MODULE:FUNCTION"),
        (":send", "is no MODULE:FUNCTION"),
        ("work_tasks:", "is no MODULE:FUNCTION"),
        ("work_tasks:receive", "has no function 'receive'"),
        ("work_tasks:__name__", "has no function"),
        ("work_absent:send", "there is no module 'work_absent'"),
        ("work_broken:send", "RuntimeError: no configuration"),
        ("work_importing:send", "work_missing_library"),
    ],
)
def test_what_is_no_function_is_refused_with_the_reason(name: str, says: str) -> None:
    with pytest.raises(click.UsageError, match=says):
        load_function(name)


def test_second_signal_ends_the_grace() -> None:
    patience = Patience(1000.0)
    assert patience.remaining_s() > 1000
    patience.handle_signal()
    assert 0 < patience.remaining_s() <= 1000
    patience.handle_signal()
    assert patience.remaining_s() == 0
    assert patience.hurried.is_set()
