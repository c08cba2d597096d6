"""Checkers of simulated consensus groups: each gets observations, knows an invariant, and raises `Violation`.

They draw no random numbers, schedule nothing and never change the cluster: a run with checkers is the run without.
"""

from quiver.testing.checkers.committed import CommittedLog, check_ack, check_end_read, check_sends
from quiver.testing.checkers.durability import PromiseChecker
from quiver.testing.checkers.observer import ConfigurationChecker, ElectionChecker, Observer

__all__ = [
    "CommittedLog",
    "ConfigurationChecker",
    "ElectionChecker",
    "Observer",
    "PromiseChecker",
    "check_ack",
    "check_end_read",
    "check_sends",
]
