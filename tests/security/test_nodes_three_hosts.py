"""The document on clusters is followed on three hosts and a fourth that joins: network namespaces of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "three_hosts.py"


@pytest.mark.timeout(600)
def test_document_leads_to_a_secure_cluster_on_three_hosts(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
