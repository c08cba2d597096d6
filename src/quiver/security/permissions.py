"""Permissions: grants, what they allow a principal, and why. Pure.

A grant allows a subject one verb on the resources of one kind that have a name, or whose name begins with a prefix. The
subject is a principal (`user:alice`, `anonymous`) or a role (`role:ops`), which a user has by membership. What no grant
allows is denied; there are no grants that deny. The verb `admin` allows every verb on the same resources; `admin` on
the cluster allows everything.

Internal topics (`quiver.…`) hold what only administrators may see: no grant on topics covers them.

`Permissions` are the grants of one principal, compiled: deciding is one lookup for a resource that was asked for
before.
`explain` decides the same without any index and names the grant; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.security.principal import Principal, PrincipalKind

ROLE_PREFIX = "role:"
USER_PREFIX = "user:"
ANONYMOUS_SUBJECT = "anonymous"
ADMIN_ROLE = "admin"
"""The role that exists without being created, and may do everything."""
INTERNAL_PREFIX = "quiver."
"""Topics whose name begins like this are internal."""
DECISIONS_MAX = 10_000
"""Decisions that a principal's permissions keep; beyond it they begin again."""

SubjectName = Annotated[str, Meta(max_length=120)]
ResourceName = Annotated[str, Meta(max_length=300)]


class Verb(StrEnum):
    """What a grant allows."""

    READ = "read"
    WRITE = "write"
    CREATE = "create"
    CONFIGURE = "configure"
    DELETE = "delete"
    ADMIN = "admin"


class ResourceKind(StrEnum):
    """What a grant is about."""

    TOPIC = "topic"
    CONSUMER = "consumer"
    PRODUCER = "producer"
    CLUSTER = "cluster"


class Grant(msgspec.Struct, frozen=True, kw_only=True, order=True, forbid_unknown_fields=True):
    """A subject's permission for a verb on the resources of one kind by name, or by prefix of the name."""

    subject: SubjectName
    verb: Verb
    kind: ResourceKind
    name: ResourceName = ""
    """Empty for the cluster; as a prefix, empty for all names."""
    is_prefix: bool = False

    def __str__(self) -> str:
        return f"{self.subject} may {self.verb} {describe_resource(self.kind, self.name, is_prefix=self.is_prefix)}"

    def covers(self, verb: Verb, kind: ResourceKind, name: str) -> bool:
        """Return whether it allows a verb on a resource."""
        if self.is_everything:
            return True
        if self.kind is not kind or self.verb not in (verb, Verb.ADMIN):
            return False
        if kind is ResourceKind.TOPIC and name.startswith(INTERNAL_PREFIX):
            return False
        return name.startswith(self.name) if self.is_prefix else name == self.name

    @property
    def is_everything(self) -> bool:
        """Return whether it allows everything: `admin` on the cluster."""
        return self.kind is ResourceKind.CLUSTER and self.verb is Verb.ADMIN


def admin_grant(subject: str) -> Grant:
    """Return the grant that allows a subject everything."""
    return Grant(subject=subject, verb=Verb.ADMIN, kind=ResourceKind.CLUSTER)


class AccessVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a principal may do something, and the grant or the rule that decides it."""

    is_allowed: bool
    reason: str
    grant: Grant | None = None


class AccessTable:
    """All grants and memberships at one moment, by subject."""

    def __init__(self, grants: Iterable[Grant], roles: Mapping[str, Iterable[str]]) -> None:
        """`roles` are the roles of each user by name."""
        self._grants: dict[str, list[Grant]] = {}
        for grant in grants:
            self._grants.setdefault(grant.subject, []).append(grant)
        self._grants.setdefault(ROLE_PREFIX + ADMIN_ROLE, []).append(admin_grant(ROLE_PREFIX + ADMIN_ROLE))
        self._roles = {user: tuple(sorted(names)) for user, names in roles.items()}

    def subjects(self, principal: Principal, roles: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the subjects that a principal is: itself, then its roles; `roles` are added to those of the user."""
        own = self._roles.get(principal.name, ()) if principal.kind is PrincipalKind.USER else ()
        return (str(principal), *(ROLE_PREFIX + role for role in dict.fromkeys((*own, *roles))))

    def grants_of(self, principal: Principal, roles: Sequence[str] = ()) -> list[Grant]:
        """Return the grants of a principal, its own first, then by role; `roles` are added to those of the user."""
        subjects = self.subjects(principal, roles)
        return [grant for subject in subjects for grant in sorted(self._grants.get(subject, ()))]


class Permissions:
    """What one principal may do, by the grants of one moment."""

    __slots__ = ("_decisions", "_exact", "_prefixes", "is_admin", "is_known", "is_powerless", "owner", "principal")

    def __init__(self, principal: Principal, grants: Iterable[Grant]) -> None:
        self.principal = principal
        self.owner = str(principal)
        """The principal as the owner of clients: as text, made once and not for each request."""
        self.is_admin = False
        """Whether everything is allowed."""
        self.is_known = principal.kind is not PrincipalKind.ANONYMOUS
        """Whether the principal has proven who it is, or needs no proof."""
        self._exact: set[tuple[Verb, ResourceKind, str]] = set()
        self._prefixes: dict[tuple[Verb, ResourceKind], list[str]] = {}
        self._decisions: dict[tuple[Verb, ResourceKind, str], bool] = {}
        for grant in grants:
            self._add(grant)
        self.is_powerless = not (self.is_admin or self.is_known or self._exact or self._prefixes)
        """Whether nothing is allowed that needs a grant."""

    def _add(self, grant: Grant) -> None:
        self.is_admin = self.is_admin or grant.is_everything
        for verb in Verb if grant.verb is Verb.ADMIN else (grant.verb,):
            if grant.is_prefix:
                self._prefixes.setdefault((verb, grant.kind), []).append(grant.name)
            else:
                self._exact.add((verb, grant.kind, grant.name))

    def allows(self, verb: Verb, kind: ResourceKind, name: str = "") -> bool:
        """Return whether a verb is allowed on a resource."""
        if self.is_admin:
            return True
        key = (verb, kind, name)
        known = self._decisions.get(key)
        if known is None:
            if len(self._decisions) >= DECISIONS_MAX:
                self._decisions.clear()
            known = self._decisions[key] = self._decide(key)
        return known

    def _decide(self, key: tuple[Verb, ResourceKind, str]) -> bool:
        verb, kind, name = key
        if kind is ResourceKind.TOPIC and name.startswith(INTERNAL_PREFIX):
            return False
        return key in self._exact or name.startswith(tuple(self._prefixes.get((verb, kind), ())))

    def sees_topic(self, name: str) -> bool:
        """Return whether any verb is allowed on a topic, so that its existence is no secret."""
        return any(self.allows(verb, ResourceKind.TOPIC, name) for verb in Verb)


def explain(table: AccessTable, principal: Principal, verb: Verb, kind: ResourceKind, name: str = "") -> AccessVerdict:
    """Return whether a principal may do something, and the first grant that allows it."""
    if principal.kind is PrincipalKind.NODE:
        return AccessVerdict(is_allowed=True, reason="nodes of the cluster may do everything")
    grants = table.grants_of(principal)
    found = next((grant for grant in grants if grant.covers(verb, kind, name)), None)
    if found is not None:
        return AccessVerdict(is_allowed=True, reason=str(found), grant=found)
    wanted = f"{verb} {describe_resource(kind, name)}"
    if kind is ResourceKind.TOPIC and name.startswith(INTERNAL_PREFIX):
        return AccessVerdict(is_allowed=False, reason=f"{wanted} needs admin on the cluster: the topic is internal")
    subjects = " or ".join(table.subjects(principal))
    return AccessVerdict(is_allowed=False, reason=f"no grant allows {subjects} to {wanted}")


def describe_resource(kind: ResourceKind, name: str, *, is_prefix: bool = False) -> str:
    """Return a resource in words."""
    if kind is ResourceKind.CLUSTER:
        return "the cluster"
    if is_prefix:
        return f"{kind}s {name}*" if name else f"all {kind}s"
    return f"{kind} {name}"
