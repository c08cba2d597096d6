"""The sans-IO Raft core: events in, one `Output` value out.

This package must never import asyncio, time, random, os, logging or threading, nor open a file: the
driver in `quiver.replication` owns all of that. Start reading at `core.Raft` and `output.Output`; the
paper is Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm" (sections are cited
as §5.2), with Ongaro's dissertation for what it leaves out.
"""

from __future__ import annotations

from quiver.raft.configuration import Configuration
from quiver.raft.core import TERM_FREE_MAX, Knows, Raft, know_everyone
from quiver.raft.log import InitialState
from quiver.raft.messages import (
    Append,
    AppendResponse,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    Outgoing,
    RaftMessage,
    Round,
    SnapshotMetadata,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from quiver.raft.output import HardState, Output, ReadReady, Role, RoleChange, SendEntries, SendSnapshot
from quiver.raft.progress import ProgressState, RaftPeerStatus
from quiver.raft.state import RaftConfig, RaftStatus

__all__ = [
    "TERM_FREE_MAX",
    "Append",
    "AppendResponse",
    "Configuration",
    "Entry",
    "EntryKind",
    "HardState",
    "Heartbeat",
    "HeartbeatResponse",
    "InitialState",
    "InstallSnapshot",
    "Knows",
    "Outgoing",
    "Output",
    "ProgressState",
    "Raft",
    "RaftConfig",
    "RaftMessage",
    "RaftPeerStatus",
    "RaftStatus",
    "ReadReady",
    "Role",
    "RoleChange",
    "Round",
    "SendEntries",
    "SendSnapshot",
    "SnapshotMetadata",
    "TimeoutNow",
    "VoteRequest",
    "VoteResponse",
    "know_everyone",
]
