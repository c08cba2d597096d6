"""Limits: how much a principal, or all users of a topic, may use; by whom they are set, and which of them apply. Pure.

The subject of limits is a principal (`user:alice`, `anonymous`), a role (`role:ops`), every principal (`default`), a
topic (`topic:logs.web`) or every topic (`topic:*`). Each limit is found by itself: the principal's own, else the
highest of its roles, else the default, else the settings of the node. So a subject's row needs only what differs.

Rates, long polls and connections are those of each node, and decided by it (`quiver.security.quotas`). The number of
topics, partitions and registrations is that of the cluster, and decided when the metadata command is applied, so that
two concurrent requests cannot pass it together (`quiver.metadata.quotas`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.security.permissions import ROLE_PREFIX, USER_PREFIX
from quiver.security.principal import Principal, PrincipalKind

LIMIT_MAX = 2**50
WEIGHT_MAX = 1_000
WEIGHT_DEFAULT = 1
QuotaSubject = Annotated[str, Meta(max_length=220)]
"""Room for the name of a topic."""
DEFAULT_SUBJECT = "default"
"""Every principal that has no limit of its own or by a role."""
TOPIC_PREFIX = "topic:"
EVERY_TOPIC = "topic:*"
"""Every topic that has no limit of its own."""


class QuotaLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of one subject. None is not set: another subject decides; 0 is no limit."""

    requests_per_second: Annotated[int, Meta(ge=0, le=LIMIT_MAX)] | None = None
    mutations_per_second: Annotated[int, Meta(ge=0, le=LIMIT_MAX)] | None = None
    """Requests that change something."""
    bytes_in_per_second: Annotated[int, Meta(ge=0, le=LIMIT_MAX)] | None = None
    bytes_out_per_second: Annotated[int, Meta(ge=0, le=LIMIT_MAX)] | None = None
    creations_per_minute: Annotated[int, Meta(ge=0, le=LIMIT_MAX)] | None = None
    """Requests that leave something behind that lasts: a topic, a producer, a consumer."""
    long_polls_max: Annotated[int, Meta(ge=0, le=LIMIT_MAX)] | None = None
    """Requests that wait for messages, over HTTP and on the wire."""
    connections_max: Annotated[int, Meta(ge=0, le=LIMIT_MAX)] | None = None
    """Connections of the wire protocol."""
    topics_max: Annotated[int, Meta(ge=0, le=LIMIT_MAX)] | None = None
    """Topics that a user created; deleted ones count until they are purged."""
    partitions_max: Annotated[int, Meta(ge=0, le=LIMIT_MAX)] | None = None
    """Partitions of these topics."""
    registrations_max: Annotated[int, Meta(ge=0, le=LIMIT_MAX)] | None = None
    """Producers and consumers that a user registered, and holds that it placed."""
    weight: Annotated[int, Meta(ge=1, le=WEIGHT_MAX)] | None = None
    """No limit, but the share of turns while a node has more to do than it can: twice the weight is twice the share."""

    def __str__(self) -> str:
        given = {name: getattr(self, name) for name in self.names}
        return ", ".join(f"{name}={value or 'unlimited'}" for name, value in given.items()) or "nothing"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the limits that are set."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    @property
    def is_unlimited(self) -> bool:
        """Return whether nothing is limited."""
        return not any(msgspec.structs.astuple(self))

    def over(self, base: QuotaLimits) -> QuotaLimits:
        """Return these limits, completed by those of `base`."""
        return msgspec.structs.replace(base, **{name: getattr(self, name) for name in self.names})


OWNED_LIMITS = frozenset(("topics_max", "partitions_max", "registrations_max"))
"""Limits on what a user owns in the cluster's metadata."""
TOPIC_LIMITS = frozenset(
    ("requests_per_second", "mutations_per_second", "bytes_in_per_second", "bytes_out_per_second", "weight")
)
"""Limits that a topic can have."""


_NO_LIMITS = QuotaLimits()


class FoundLimit(msgspec.Struct, frozen=True):
    """A limit that applies, and the subject that it is set for."""

    amount: int
    subject: str


def find_limit(
    limits: Mapping[str, QuotaLimits], name: str, *, principal: str, roles: Iterable[str]
) -> FoundLimit | None:
    """Return the limit of a name that applies to a principal with these roles; None if there is none."""
    found = _limit_of(limits, principal, name)
    if found is None:
        by_role = [one for role in roles if (one := _limit_of(limits, ROLE_PREFIX + role, name)) is not None]
        found = max(by_role, key=lambda one: one.amount or LIMIT_MAX + 1, default=None)
    if found is None:
        found = _limit_of(limits, DEFAULT_SUBJECT, name)
    return found


def _limit_of(limits: Mapping[str, QuotaLimits], subject: str, name: str) -> FoundLimit | None:
    row = limits.get(subject)
    amount: int | None = None if row is None else getattr(row, name)
    return None if amount is None else FoundLimit(amount, subject)


def is_share_used(*, own: int, used: int, most: int) -> bool:
    """Return whether a principal that has `own` of the `used` things of a kind may not have another one.

    There are at most `most` of them for everybody. Once half of these are used, one principal has at most an eighth, so
    that no single one can use up what others need.
    """
    return used >= most or (used >= most // 2 and own >= most // 8)


class QuotaTable:
    """The limits of all subjects, and the roles of users, at one moment."""

    def __init__(self, limits: Mapping[str, QuotaLimits], roles: Mapping[str, Iterable[str]]) -> None:
        """`roles` are the roles of each user by name."""
        self._limits = limits
        self._roles = roles
        self.is_empty = not limits
        """Whether no limits are set."""

    def limits_of(self, principal: Principal, base: QuotaLimits) -> QuotaLimits:
        """Return the limits of a principal; `base` are those of the node's settings."""
        if not self._limits:
            return base
        roles = self._roles.get(principal.name, ()) if principal.kind is PrincipalKind.USER else ()
        found = {
            name: limit.amount
            for name in QuotaLimits.__struct_fields__
            if (limit := find_limit(self._limits, name, principal=str(principal), roles=roles)) is not None
        }
        return msgspec.structs.replace(base, **found)

    def weight_of(self, principal: str) -> int:
        """Return the weight of a principal by its name, such as `user:alice`."""
        if not self._limits:
            return WEIGHT_DEFAULT
        roles = self._roles.get(principal.removeprefix(USER_PREFIX), ()) if principal.startswith(USER_PREFIX) else ()
        found = find_limit(self._limits, "weight", principal=principal, roles=roles)
        return WEIGHT_DEFAULT if found is None else found.amount

    def topic_weight_of(self, topic: str) -> int:
        """Return the weight of a topic."""
        return self.topic_limits_of(topic, _NO_LIMITS).weight or WEIGHT_DEFAULT

    def topic_limits_of(self, topic: str, base: QuotaLimits) -> QuotaLimits:
        """Return the limits of a topic; `base` are those of the node's settings."""
        for subject in (EVERY_TOPIC, TOPIC_PREFIX + topic):
            if (found := self._limits.get(subject)) is not None:
                base = found.over(base)
        return base
