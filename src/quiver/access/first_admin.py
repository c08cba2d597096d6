"""The first administrator of a secure cluster, from a file that `quiver security init` made.

The primary of a cluster without users creates the user `admin` with the token whose id and hash are in the file, so the
cluster never stores the token, and a cluster that deleted all its users by mistake can be administered again.
"""

from __future__ import annotations

import asyncio
import logging

from quiver.clock import Clock
from quiver.errors import QuiverError
from quiver.logs import facts
from quiver.metadata import ChangeMemberCommand, CreateTokenCommand, CreateUserCommand, MetadataStore
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
        view = store.view()
        if view.tokens or view.users.keys() - {ADMIN_USER}:
            return
        try:
            token_id, secret_hash = await asyncio.to_thread(load_admin_file, path)
            now_ms = clock.wall_ms()
            if ADMIN_USER not in view.users:  # an earlier primary may have stopped half-way
                await store.submit(CreateUserCommand(now_ms=now_ms, user=ADMIN_USER))
            await store.submit(ChangeMemberCommand(now_ms=now_ms, role=ADMIN_ROLE, user=ADMIN_USER, is_member=True))
            await store.submit(
                CreateTokenCommand(now_ms=now_ms, user=ADMIN_USER, token_id=token_id, secret_hash=secret_hash)
            )
        except QuiverError as error:
            logger.warning("first administrator not created", extra=facts(error=error))
            await asyncio.sleep(RETRY_S)
        else:
            logger.info("first administrator created", extra=facts(user=ADMIN_USER, token=token_id))
            return
