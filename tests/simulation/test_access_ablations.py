"""Administrators revoke while nodes and networks fail: nothing is found, unless a safeguard is switched off."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest

from quiver.access import AccessControl
from quiver.clock import Rng
from quiver.dispatch import RequestDispatcher
from quiver.metadata import access
from quiver.metadata.decision import CommandDecision
from quiver.metadata.state import MetadataState
from quiver.security.identity import ConnectionIdentity
from quiver.security.permissions import Permissions
from quiver.testing.clusters.model import ClusterModel
from quiver.testing.clusters.swarm import ClusterKnobs, draw_cluster_knobs
from quiver.testing.simulator.runner import run_seed
from quiver.wire.messages import AnyRequest
from quiver.wire.serving import Answer, Caller, RequestHandler

SEEDS_MAX = 6
WEIGHTS = {"isolate": 6, "pause": 6, "kill": 2, "lossy_network": 4}


@dataclass(frozen=True, slots=True)
class BusyAdministrators(ClusterModel):
    """Small clusters whose administrators do most of the work, under faults that let nodes lag."""

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        knobs = replace(draw_cluster_knobs(rng), queue=None, members=None)
        return replace(
            knobs,
            managers=3,
            brokers=0,
            topics=tuple(replace(topic, partitions=1, replicas=1) for topic in knobs.topics[:1]),
            admins=2,
            senders=1,
            readers=0,
            committers=0,
            takers=0,
            makers=0,
            mixes_versions=False,
            weights=WEIGHTS,
            chaos_ms=6_000,
            gap_ms=400,
        )


def keep_permissions(control: AccessControl, identity: ConnectionIdentity) -> Permissions:
    """Compile the permissions of a connection once and for all."""
    found = identity.permissions
    if found is None or (identity.version is None and identity.credential is not None):
        found = control._renew(identity, control.view())
    return found


def answer_at_once(
    dispatcher: RequestDispatcher, handler: RequestHandler, caller: Caller, request: AnyRequest, payload: memoryview
) -> Awaitable[Answer]:
    """Judge a request by this node's metadata, however old."""
    return dispatcher._handle_now(handler, caller, request, payload)


def revoke_nothing(_: MetadataState, __: object) -> CommandDecision:
    return CommandDecision()


ABLATIONS: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "permissions_are_compiled_again": (lambda: patch.object(AccessControl, "permissions", keep_permissions), "A1"),
    "requests_wait_for_their_index": (lambda: patch.object(RequestDispatcher, "_handle", answer_at_once), "A1"),
    "tokens_are_deleted": (lambda: patch.object(access, "revoke_token", revoke_nothing), "A"),
}
"""By name: what switches a safeguard off, and what the finding begins with."""


@pytest.mark.parametrize("name", ABLATIONS)
def test_simulation_notices_when_a_safeguard_of_access_is_off(name: str) -> None:
    switch_off, says = ABLATIONS[name]
    with switch_off():
        for seed in range(SEEDS_MAX):
            report = run_seed(BusyAdministrators(), seed)
            if report.finding is not None:
                assert report.finding.startswith(says), report.finding
                return
    pytest.fail(f"{SEEDS_MAX} seeds without {name} found nothing")


@pytest.mark.parametrize("seed", range(1))
def test_administrators_find_nothing_while_all_safeguards_are_on(seed: int) -> None:
    report = run_seed(BusyAdministrators(), seed)
    assert report.finding is None, f"{report.finding}\n" + "\n".join(report.tail)
    assert report.effects["access permitted"]
    assert report.effects["access unauthenticated"]
    assert report.effects["revoke_token ok"]
