"""The transcripts move the same in-memory cluster as the unit tests of the Raft core."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit" / "raft"))
