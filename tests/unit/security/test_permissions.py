"""Permissions: the compiled form decides as the naive one does, and the rules that grants cannot change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quiver.model import NodeId
from quiver.security import ANONYMOUS, Principal, node_principal, user_principal
from quiver.security.permissions import (
    AccessTable,
    Grant,
    Permissions,
    ResourceKind,
    Verb,
    admin_grant,
    explain,
)

NAMES = st.sampled_from(["", "a", "ab", "abc", "b", "quiver.audit", "quiver."])
USERS = st.sampled_from(["alice", "bob"])
ROLES = st.sampled_from(["ops", "dev", "admin"])
SUBJECTS = st.one_of(USERS.map("user:{}".format), ROLES.map("role:{}".format), st.just("anonymous"))
GRANTS = st.builds(
    Grant,
    subject=SUBJECTS,
    verb=st.sampled_from(Verb),
    kind=st.sampled_from(ResourceKind),
    name=NAMES,
    is_prefix=st.booleans(),
)
TABLES = st.builds(
    AccessTable,
    st.lists(GRANTS, max_size=12),
    st.dictionaries(USERS, st.sets(ROLES.filter("admin".__ne__), max_size=2)),
)
PRINCIPALS = st.one_of(USERS.map(user_principal), st.just(ANONYMOUS))


@given(TABLES, PRINCIPALS, st.sampled_from(Verb), st.sampled_from(ResourceKind), NAMES)
def test_compiled_permissions_decide_as_the_grants_one_by_one(
    table: AccessTable, principal: Principal, verb: Verb, kind: ResourceKind, name: str
) -> None:
    permissions = Permissions(principal, table.grants_of(principal))
    verdict = explain(table, principal, verb, kind, name)
    assert permissions.allows(verb, kind, name) is verdict.is_allowed
    assert permissions.allows(verb, kind, name) is verdict.is_allowed  # from its cache
    assert (verdict.grant is not None) is verdict.is_allowed
    if verdict.grant is not None:
        assert verdict.grant.subject in table.subjects(principal)


@given(TABLES, PRINCIPALS)
def test_internal_topics_are_for_administrators_only(table: AccessTable, principal: Principal) -> None:
    permissions = Permissions(principal, table.grants_of(principal))
    assert permissions.sees_topic("quiver.audit") is permissions.is_admin


def test_nothing_is_allowed_without_a_grant() -> None:
    table = AccessTable((), {})
    verdict = explain(table, user_principal("alice"), Verb.READ, ResourceKind.TOPIC, "logs.web")
    assert verdict.reason == "no grant allows user:alice to read topic logs.web"
    assert not verdict.is_allowed
    assert not Permissions(ANONYMOUS, ()).allows(Verb.READ, ResourceKind.CLUSTER)


def test_verdict_names_the_deciding_grant() -> None:
    grant = Grant(subject="role:ops", verb=Verb.WRITE, kind=ResourceKind.TOPIC, name="logs.", is_prefix=True)
    table = AccessTable([grant], {"alice": ["ops"]})
    verdict = explain(table, user_principal("alice"), Verb.WRITE, ResourceKind.TOPIC, "logs.web")
    assert (verdict.is_allowed, verdict.grant) == (True, grant)
    assert verdict.reason == "role:ops may write topics logs.*"
    denied = explain(table, user_principal("alice"), Verb.READ, ResourceKind.TOPIC, "logs.web")
    assert denied.reason == "no grant allows user:alice or role:ops to read topic logs.web"


def test_admin_on_a_resource_is_every_verb_on_it_and_nothing_else() -> None:
    grant = Grant(subject="user:alice", verb=Verb.ADMIN, kind=ResourceKind.TOPIC, name="logs", is_prefix=False)
    permissions = Permissions(user_principal("alice"), [grant])
    assert all(permissions.allows(verb, ResourceKind.TOPIC, "logs") for verb in Verb)
    assert not permissions.allows(Verb.READ, ResourceKind.TOPIC, "logs.web")
    assert not permissions.allows(Verb.READ, ResourceKind.CLUSTER)
    assert not permissions.is_admin


def test_members_of_the_role_admin_may_do_everything() -> None:
    table = AccessTable((), {"root": ["admin"]})
    permissions = Permissions(user_principal("root"), table.grants_of(user_principal("root")))
    assert permissions.is_admin
    assert permissions.allows(Verb.DELETE, ResourceKind.TOPIC, "quiver.audit")
    assert admin_grant("x").is_everything


def test_user_cannot_have_the_name_of_another_kind_of_subject() -> None:
    table = AccessTable([admin_grant("anonymous"), admin_grant("node:1")], {})
    assert table.grants_of(user_principal("anonymous")) == []
    assert table.grants_of(user_principal("1")) == []
    assert explain(table, node_principal(NodeId(1)), Verb.ADMIN, ResourceKind.CLUSTER).is_allowed
