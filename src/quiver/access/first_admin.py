"""The first administrator of a secure cluster, from a file that `quiver security init` made.

The primary of a cluster without users creates the user `admin` with the token whose id and hash are in the file, so the
cluster never stores the token, and a cluster that deleted all its users by mistake can be administered again.

It gets its role last: whoever has it was complete once, and gets no token back that was revoked since.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from quiver.clock import Clock
from quiver.errors import QuiverError
from quiver.logs import facts
from quiver.metadata import (
    ChangeMemberCommand,
    Command,
    CreateTokenCommand,
    CreateUserCommand,
    MetadataStore,
    View,
)
from quiver.metadata.clients import OWNERS_LEVEL
from quiver.security.admin_file import load_admin_file
from quiver.security.permissions import ADMIN_ROLE

logger = logging.getLogger(__name__)

ADMIN_USER = "admin"
RETRY_S = 1.0


async def create_first_admin(store: MetadataStore, clock: Clock, path: str) -> None:
    """Create the first administrator while this node is the primary of a cluster without users; returns when done."""
    while not store.is_closed:
        await store.wait_primary(is_primary=True)
        await store.wait_level(OWNERS_LEVEL)
        if not is_missing(store.view()):
            return
        try:
            token_id, secret_hash = await asyncio.to_thread(load_admin_file, path)
            for command in list_steps(store.view(), clock.wall_ms(), token_id, secret_hash):
                await store.submit(command)
        except QuiverError as error:
            logger.warning("first administrator not created", extra=facts(error=error))
            await asyncio.sleep(RETRY_S)
        else:
            logger.info("first administrator created", extra=facts(user=ADMIN_USER, token=token_id))
            return


def is_missing(view: View) -> bool:
    """Return whether a cluster has no user, or only a first administrator that an earlier primary did not complete."""
    return (ADMIN_ROLE, ADMIN_USER) not in view.memberships and view.users.keys() <= {ADMIN_USER}


def list_steps(view: View, now_ms: int, token_id: str, secret_hash: str) -> list[Command[Any]]:
    """Return the commands that are still needed for the first administrator, in order."""
    steps: list[Command[Any]] = []
    if ADMIN_USER not in view.users:
        steps.append(CreateUserCommand(now_ms=now_ms, user=ADMIN_USER))
    if token_id not in view.tokens:
        steps.append(CreateTokenCommand(now_ms=now_ms, user=ADMIN_USER, token_id=token_id, secret_hash=secret_hash))
    return [*steps, ChangeMemberCommand(now_ms=now_ms, role=ADMIN_ROLE, user=ADMIN_USER, is_member=True)]
