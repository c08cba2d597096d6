"""Bounds of consumer groups, the same wherever a request or a command is checked. Pure."""

from __future__ import annotations

SESSION_TIMEOUT_MS = 10_000
"""The session timeout of a member that names none."""
SESSION_TIMEOUT_MS_MIN = 1_000
SESSION_TIMEOUT_MS_MAX = 3_600_000
TOPICS_MAX = 1_000
"""Most topics that one member names; a pattern may match more."""
PAUSE_MS_MAX = 600_000
"""Longest pause of a restarted group."""
GROUPS_MAX = 100_000
"""Most groups of a cluster."""
MEMBERS_MAX = 5_000
"""Most members of one group."""
MEMBERS_TOTAL_MAX = 50_000
"""Most members of all groups together."""
ASSIGNED_MAX = 500_000
"""Most partitions that members own, of all groups together."""
STEPS_MAX = 10_000
"""Most partitions that one command gives and takes."""
