"""Commands on quotas, and the limits on what a user owns. Pure; called only by `apply` and by other commands.

A user's topics, partitions and registrations are counted when the command that adds one is applied: every member
decides alike, and concurrent requests cannot exceed a limit together. A lower limit takes nothing away; it refuses what
is new. What nobody owns is not counted: what was made without credentials, or by the cluster itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quiver.metadata.commands import RemoveQuotaCommand, SetQuotaCommand
from quiver.metadata.decision import CommandDecision, CommandRefusal, refuse
from quiver.metadata.rows import HoldRow, QuotaRow, Table
from quiver.metadata.state import Change, MetadataState, drop, put
from quiver.model import TOPIC_NAME_PATTERN
from quiver.security.limits import (
    DEFAULT_SUBJECT,
    EVERY_TOPIC,
    OWNED_LIMITS,
    TOPIC_LIMITS,
    TOPIC_PREFIX,
    FoundLimit,
    QuotaLimits,
    find_limit,
)
from quiver.security.permissions import ADMIN_ROLE, ANONYMOUS_SUBJECT, ROLE_PREFIX, USER_PREFIX

QUOTAS_MAX = 10_000
"""Most subjects with quotas."""
OWNED_QUOTAS = {f"quota_{name.removesuffix('_max')}": name for name in sorted(OWNED_LIMITS)}
"""The limits on what a user owns, by the codes of their refusals."""
_TOPIC = re.compile(TOPIC_NAME_PATTERN)


def set_quota(state: MetadataState, command: SetQuotaCommand) -> CommandDecision | CommandRefusal:
    """Set limits of a subject."""
    quotas: Mapping[str, QuotaRow] = state.tables[Table.QUOTAS]
    refusal = _check_subject(state, command.subject) or _check_limits(command)
    if refusal is not None:
        return refusal
    known = quotas.get(command.subject)
    if known is None and len(quotas) >= QUOTAS_MAX:
        message = f"not done: {QUOTAS_MAX} principals, roles and topics have quotas, the maximum; use roles or defaults"
        return refuse("too_many_quotas", message)
    limits = command.limits.over(QuotaLimits() if known is None else known.limits)
    if known is not None and known.limits == limits:
        return CommandDecision()
    return CommandDecision([put(QuotaRow(subject=command.subject, limits=limits, changed_ms=command.now_ms))])


def remove_quota(state: MetadataState, command: RemoveQuotaCommand) -> CommandDecision | CommandRefusal:
    """Remove all limits of a subject."""
    changes = drop_quota(state, command.subject)
    if not changes:
        return refuse("unknown_quota", f"not done: {command.subject} has no quotas; list them")
    return CommandDecision(changes)


def drop_quota(state: MetadataState, subject: str) -> list[Change]:
    """Return the change that removes the limits of a subject, if it has any."""
    known: QuotaRow | None = state.tables[Table.QUOTAS].get(subject)
    return [] if known is None else [drop(known)]


# -- what a user owns --------------------------------------------------------------------------------


def check_topics(state: MetadataState, owner: str, *, partitions: int) -> CommandRefusal | None:
    """Return why a user may not own one topic more with these partitions; None if it may."""
    limit = _find_limit(state, owner, "topics_max")
    owned = state.owned.get((Table.TOPICS, owner), 0)
    if limit is not None and owned >= limit.amount:
        message = f"not done: {owner} owns {owned} topics{_explain(limit, 'topics')}; {_HOW_TO_FREE_TOPICS}"
        return refuse("quota_topics", message)
    return check_partitions(state, owner, added=partitions)


def check_partitions(state: MetadataState, owner: str, *, added: int) -> CommandRefusal | None:
    """Return why the topics of a user may not have more partitions; None if they may."""
    limit = _find_limit(state, owner, "partitions_max")
    owned = state.owned.get((Table.PARTITIONS, owner), 0)
    if limit is None or owned + added <= limit.amount:
        return None
    message = (
        f"not done: the topics of {owner} have {owned} partitions, and would have {owned + added}"
        f"{_explain(limit, 'partitions')}; {_HOW_TO_FREE_TOPICS}"
    )
    return refuse("quota_partitions", message)


def check_registrations(state: MetadataState, owner: str) -> CommandRefusal | None:
    """Return why a user may not register one producer or consumer more, or place one hold more; None if it may."""
    limit = _find_limit(state, owner, "registrations_max")
    if limit is None:
        return None
    owned = sum(state.owned.get((table, owner), 0) for table in (Table.PRODUCERS, Table.CONSUMERS))
    holds: Mapping[object, HoldRow] = state.tables[Table.HOLDS]
    owned += sum(hold.principal == owner for hold in holds.values())
    if owned < limit.amount:
        return None
    message = (
        f"not done: {owner} has {owned} producers, consumers and holds{_explain(limit, 'registrations')}; "
        "forget or release some, or reuse their names"
    )
    return refuse("quota_registrations", message)


_HOW_TO_FREE_TOPICS = "a deleted topic counts until it is purged"


def _explain(limit: FoundLimit, name: str) -> str:
    return (
        f": its quota {name}_max is {limit.amount} (set for {limit.subject}), which an administrator can raise with "
        f"quiver quota set"
    )


def _find_limit(state: MetadataState, owner: str, name: str) -> FoundLimit | None:
    """Return the limit of a user that bounds it; None if nothing does."""
    quotas: Mapping[str, QuotaRow] = state.tables[Table.QUOTAS]
    if not owner or not quotas:
        return None
    user = owner.removeprefix(USER_PREFIX)
    subjects = (owner, DEFAULT_SUBJECT)
    roles = [role for role, member in sorted(state.tables[Table.MEMBERSHIPS]) if member == user]
    subjects += tuple(ROLE_PREFIX + role for role in roles)
    limits = {subject: quotas[subject].limits for subject in subjects if subject in quotas}
    found = find_limit(limits, name, principal=owner, roles=roles)
    return found if found is not None and found.amount else None


# -- checks ------------------------------------------------------------------------------------------


def _check_subject(state: MetadataState, subject: str) -> CommandRefusal | None:
    kind, _, name = subject.partition(":")
    if subject in (DEFAULT_SUBJECT, ANONYMOUS_SUBJECT, EVERY_TOPIC):
        return None
    if subject.startswith(USER_PREFIX):
        is_known = name in state.tables[Table.USERS]
        return None if is_known else refuse("unknown_user", f"not done: unknown user {name!r}")
    if subject.startswith(ROLE_PREFIX):
        is_known = name == ADMIN_ROLE or name in state.tables[Table.ROLES]
        return None if is_known else refuse("unknown_role", f"not done: unknown role {name!r}")
    if subject.startswith(TOPIC_PREFIX) and _TOPIC.fullmatch(name):
        return None
    return refuse(
        "bad_quota",
        f"not done: {kind!r} cannot have quotas; give user:<name>, role:<name>, {ANONYMOUS_SUBJECT}, "
        f"{DEFAULT_SUBJECT}, {TOPIC_PREFIX}<name> or {EVERY_TOPIC}",
    )


def _check_limits(command: SetQuotaCommand) -> CommandRefusal | None:
    given = command.limits.names
    if not given:
        return refuse("bad_quota", "not done: no limit is given; give at least one")
    if command.subject.startswith(TOPIC_PREFIX):
        wrong = [name for name in given if name not in TOPIC_LIMITS]
    elif command.subject == ANONYMOUS_SUBJECT:
        wrong = [name for name in given if name in OWNED_LIMITS]
    else:
        wrong = []
    if not wrong:
        return None
    reason = (
        "a topic has only rates and a weight" if command.subject != ANONYMOUS_SUBJECT else "only users own something"
    )
    return refuse("bad_quota", f"not done: {command.subject} cannot have {', '.join(wrong)}: {reason}")
