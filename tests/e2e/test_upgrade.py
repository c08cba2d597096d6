"""A cluster of the earlier program is upgraded node by node under load; `make test-upgrade` also rolls it back."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_upgrade import ROOT, NoBaseError, Upgrade, find_base


@pytest.mark.timeout(600)
def test_nodes_are_upgraded_one_by_one_under_load(tmp_path: Path) -> None:
    try:
        base = find_base(ROOT / "build")
    except NoBaseError as error:
        pytest.skip(str(error))
    report = Upgrade(tmp_path, base).run(with_downgrade=False)
    assert report.is_clean, str(report)
    for fact in ("records_acknowledged", "records_read"):
        assert report.verdict.facts[fact] > 0, report
