"""Commands on users, tokens, roles and grants, and the owners of clients."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_commands import VERIFIER, commands
from metadata_world import NOW_MS, do, formed_state, init_cluster, register_consumer, register_producer

from quiver.metadata import access, clients
from quiver.metadata.apply import AccessCommand, apply
from quiver.metadata.commands import (
    AddGrantCommand,
    AnyCommand,
    ChangeMemberCommand,
    ChangeUserCommand,
    CreateRoleCommand,
    CreateTokenCommand,
    CreateUserCommand,
    DeleteRoleCommand,
    DeleteUserCommand,
    RegisterProducerResult,
    RemoveGrantCommand,
    RevokeTokenCommand,
)
from quiver.metadata.rows import GrantRow
from quiver.metadata.state import MetadataState
from quiver.security import user_principal
from quiver.security.permissions import Grant, Permissions, ResourceKind, Verb
from quiver.security.tokens import hash_secret, new_token

WRITE_LOGS = Grant(subject="user:alice", verb=Verb.WRITE, kind=ResourceKind.TOPIC, name="logs.", is_prefix=True)


@pytest.fixture
def state() -> MetadataState:
    found = formed_state(feature_level=2)
    do(found, CreateUserCommand(now_ms=NOW_MS, user="alice"))
    return found


def code_of(state: MetadataState, command: AnyCommand) -> str:
    outcome = apply(state, command)
    assert outcome.refusal is not None
    assert "not done" in outcome.refusal.message
    return outcome.refusal.code


def token(user: str = "alice", *, now_ms: int = NOW_MS, expires_ms: int | None = None) -> CreateTokenCommand:
    made = new_token()
    return CreateTokenCommand(
        now_ms=now_ms, user=user, token_id=made.id, secret_hash=hash_secret(made.secret), expires_ms=expires_ms
    )


# -- users and tokens --------------------------------------------------------------------------------


def test_user_has_two_tokens_at_most_and_expired_ones_make_room(state: MetadataState) -> None:
    do(state, token(expires_ms=NOW_MS + 10))
    do(state, token())
    assert code_of(state, token()) == "too_many_tokens"
    do(state, token(now_ms=NOW_MS + 10))
    assert len(state.view().tokens) == 2
    assert all(one.expires_ms is None for one in state.view().tokens.values())


def test_token_is_refused_without_user_id_or_hash(state: MetadataState) -> None:
    assert code_of(state, token("bob")) == "unknown_user"
    made = token()
    do(state, made)
    assert code_of(state, made) == "token_exists"
    for changed in ({"token_id": "x"}, {"secret_hash": "x"}, {"expires_ms": NOW_MS}):
        fields: dict[str, Any] = {"token_id": "0" * 16, "secret_hash": "0" * 64} | changed
        assert code_of(state, CreateTokenCommand(now_ms=NOW_MS, user="alice", **fields)) == "bad_token"
    do(state, RevokeTokenCommand(now_ms=NOW_MS, token_id=made.token_id))
    assert code_of(state, RevokeTokenCommand(now_ms=NOW_MS, token_id=made.token_id)) == "unknown_token"


def test_deleted_user_leaves_nothing_that_a_later_one_inherits(state: MetadataState) -> None:
    do(state, CreateRoleCommand(now_ms=NOW_MS, role="ops"))
    do(state, ChangeMemberCommand(now_ms=NOW_MS, role="ops", user="alice", is_member=True))
    do(state, AddGrantCommand(now_ms=NOW_MS, grant=WRITE_LOGS))
    do(state, token())
    do(state, DeleteUserCommand(now_ms=NOW_MS, user="alice"))
    do(state, CreateUserCommand(now_ms=NOW_MS, user="alice"))
    view = state.view()
    assert (view.tokens, view.memberships, view.grants) == ({}, {}, {})


def test_deleted_role_leaves_nothing_either(state: MetadataState) -> None:
    do(state, CreateRoleCommand(now_ms=NOW_MS, role="ops"))
    do(state, ChangeMemberCommand(now_ms=NOW_MS, role="ops", user="alice", is_member=True))
    grant = Grant(subject="role:ops", verb=Verb.READ, kind=ResourceKind.CLUSTER)
    do(state, AddGrantCommand(now_ms=NOW_MS, grant=grant))
    do(state, DeleteRoleCommand(now_ms=NOW_MS, role="ops"))
    assert (state.view().memberships, state.view().grants) == ({}, {})
    assert code_of(state, DeleteRoleCommand(now_ms=NOW_MS, role="ops")) == "unknown_role"
    assert code_of(state, AddGrantCommand(now_ms=NOW_MS, grant=grant)) == "unknown_role"


def test_user_is_changed_in_parts(state: MetadataState) -> None:
    do(state, ChangeUserCommand(now_ms=NOW_MS, user="alice", verifier=VERIFIER))
    do(state, ChangeUserCommand(now_ms=NOW_MS, user="alice", is_enabled=False))
    alice = state.view().users["alice"]
    assert (alice.is_enabled, alice.verifier) == (False, VERIFIER)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "-a", "x" * 101, "ä"])
def test_names_need_no_quotes(state: MetadataState, name: str) -> None:
    assert code_of(state, CreateUserCommand(now_ms=NOW_MS, user=name)) == "bad_name"
    assert code_of(state, CreateRoleCommand(now_ms=NOW_MS, role=name)) == "bad_name"


def test_role_admin_exists_from_the_start(state: MetadataState) -> None:
    assert code_of(state, CreateRoleCommand(now_ms=NOW_MS, role="admin")) == "role_exists"
    do(state, ChangeMemberCommand(now_ms=NOW_MS, role="admin", user="alice", is_member=True))
    alice = user_principal("alice")
    assert Permissions(alice, state.view().access.grants_of(alice)).is_admin


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"subject": "user:bob"}, "unknown_user"),
        ({"subject": "role:dev"}, "unknown_role"),
        ({"subject": "role:admin"}, "unknown_role"),
        ({"subject": "node:1"}, "bad_grant"),
        ({"subject": "alice"}, "bad_grant"),
        ({"name": ""}, "bad_grant"),
        ({"name": "a\x01"}, "bad_grant"),
        ({"name": "a\x85"}, "bad_grant"),
        ({"kind": ResourceKind.CLUSTER}, "bad_grant"),
    ],
)
def test_grants_that_say_nothing_are_refused(state: MetadataState, fields: dict[str, Any], code: str) -> None:
    given = {"subject": "user:alice", "verb": Verb.READ, "kind": ResourceKind.TOPIC, "name": "logs"} | fields
    assert code_of(state, AddGrantCommand(now_ms=NOW_MS, grant=Grant(**given))) == code


def test_grants_do_not_depend_on_the_version_of_unicode_that_a_node_knows(state: MetadataState) -> None:
    unassigned = "\u0378"  # in every version so far; a node with a later one may call it printable
    grant = Grant(subject="user:alice", verb=Verb.READ, kind=ResourceKind.PRODUCER, name=unassigned)
    do(state, AddGrantCommand(now_ms=NOW_MS, grant=grant))
    assert [row.grant for row in state.view().grants.values()] == [grant]


def test_grant_is_added_and_removed_once(state: MetadataState) -> None:
    do(state, AddGrantCommand(now_ms=NOW_MS, grant=WRITE_LOGS))
    do(state, AddGrantCommand(now_ms=NOW_MS, grant=WRITE_LOGS))
    assert [row.grant for row in state.view().grants.values()] == [WRITE_LOGS]
    do(state, RemoveGrantCommand(now_ms=NOW_MS, grant=WRITE_LOGS))
    assert code_of(state, RemoveGrantCommand(now_ms=NOW_MS, grant=WRITE_LOGS)) == "unknown_grant"


def test_every_table_is_bounded(state: MetadataState, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USERS_MAX", "ROLES_MAX", "ROLES_PER_USER_MAX", "GRANTS_MAX"):
        monkeypatch.setattr(access, name, 1)
    assert code_of(state, CreateUserCommand(now_ms=NOW_MS, user="bob")) == "too_many_users"
    do(state, CreateRoleCommand(now_ms=NOW_MS, role="ops"))
    assert code_of(state, CreateRoleCommand(now_ms=NOW_MS, role="dev")) == "too_many_roles"
    do(state, ChangeMemberCommand(now_ms=NOW_MS, role="ops", user="alice", is_member=True))
    admin = ChangeMemberCommand(now_ms=NOW_MS, role="admin", user="alice", is_member=True)
    assert code_of(state, admin) == "too_many_roles"
    do(state, AddGrantCommand(now_ms=NOW_MS, grant=WRITE_LOGS))
    other = Grant(subject="anonymous", verb=Verb.READ, kind=ResourceKind.CLUSTER)
    assert code_of(state, AddGrantCommand(now_ms=NOW_MS, grant=other)) == "too_many_grants"
    monkeypatch.setattr(access, "GRANTS_MAX", 2)
    monkeypatch.setattr(access, "GRANTS_PER_SUBJECT_MAX", 0)
    assert code_of(state, AddGrantCommand(now_ms=NOW_MS, grant=other)) == "too_many_grants"


def test_access_of_a_view_is_the_same_object_until_it_changes(state: MetadataState) -> None:
    before = state.view().access
    do(state, register_producer())
    assert state.view().access is before
    do(state, AddGrantCommand(now_ms=NOW_MS, grant=WRITE_LOGS))
    assert state.view().access is not before


def test_nothing_of_it_exists_below_its_feature_level() -> None:
    state = formed_state(feature_level=1)
    assert code_of(state, CreateUserCommand(now_ms=NOW_MS, user="alice")) == "feature_level"
    assert code_of(state, register_producer(principal="user:alice")) == "feature_level"


# -- owners ------------------------------------------------------------------------------------------


def test_nobody_else_takes_a_producers_name_or_id(state: MetadataState) -> None:
    made = do(state, register_producer(name="p", principal="user:alice"))
    assert isinstance(made, RegisterProducerResult)
    for fields in ({"name": "p"}, {"producer_id": made.producer_id}):
        assert code_of(state, register_producer(principal="user:bob", **fields)) == "not_owner"
        assert code_of(state, register_producer(**fields)) == "not_owner"
    assert state.view().producers[made.producer_id].epoch == 0, "it was not fenced"
    do(state, register_producer(name="p", principal="user:alice"))
    do(state, register_producer(name="p", principal="user:root", takes_over=True))
    row = state.view().producers[made.producer_id]
    assert (row.epoch, row.owner) == (2, "user:alice")


def test_nobody_else_takes_a_consumers_name_or_id(state: MetadataState) -> None:
    do(state, register_consumer(request_id="c", principal="user:alice"))
    for fields in ({"request_id": "c"}, {"consumer_id": 1}):
        assert code_of(state, register_consumer(principal="user:bob", **fields)) == "not_owner"
    do(state, register_consumer(request_id="c", principal="user:alice"))


def test_client_without_an_owner_belongs_to_the_first_that_comes(state: MetadataState) -> None:
    do(state, register_producer(name="p"))
    do(state, register_producer(name="p", principal="user:alice"))
    assert code_of(state, register_producer(name="p", principal="user:bob")) == "not_owner"


def test_clients_are_bounded(state: MetadataState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CLIENTS_MAX", 1)
    do(state, register_producer(name="p"))
    assert code_of(state, register_producer()) == "too_many_clients"
    do(state, register_producer(name="p"))
    do(state, register_consumer())
    assert code_of(state, register_consumer()) == "too_many_clients"
    monkeypatch.setattr(clients, "REGISTRATIONS_MAX", 0)
    assert code_of(state, register_producer(name="p")) == "too_many_clients"


# -- properties --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(commands(AccessCommand), max_size=30))
def test_rows_always_refer_to_what_exists(found: list[AnyCommand]) -> None:
    state = MetadataState()
    do(state, init_cluster(feature_level=2))
    for command in found:
        assert not apply(state, command).is_defect
    view = state.view()
    assert {one.user for one in view.tokens.values()} <= set(view.users)
    for role, user in view.memberships:
        assert user in view.users
        assert role == "admin" or role in view.roles
    for row in view.grants.values():
        assert _exists(row, set(view.users), set(view.roles))
    for subject in view.quotas:
        kind, _, name = subject.partition(":")
        assert name in {"user": view.users, "role": view.roles}.get(kind, {name: None})
    users = [one.user for one in view.tokens.values()]
    assert all(users.count(user) <= access.TOKENS_PER_USER_MAX for user in users)
    assert MetadataState.decode(view.encode()).view().digest() == view.digest()


def _exists(row: GrantRow, users: set[str], roles: set[str]) -> bool:
    kind, _, name = row.subject.partition(":")
    return row.subject == "anonymous" or name in {"user": users, "role": roles}[kind]
