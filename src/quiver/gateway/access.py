"""Who may call which route: the rule of every route by its name, and the identity of an HTTP request.

A rule gets the caller's permissions, the metadata and the decoded parameters. Rules of requests that are passed on in
the caller's name are decided again by the node that does them (`quiver.access.rules`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from quiver.access import AccessControl, Authenticator
from quiver.access.audit import AuditedOperation
from quiver.access.rules import deny, require, require_known, require_owner
from quiver.errors import NotAllowedError, NotFoundError
from quiver.gateway import access_contract, contract, group_contract, queue_contract
from quiver.gateway.console import contract as console_contract
from quiver.gateway.console.pipelines import RUNS_TOPIC
from quiver.gateway.group_filters import GroupsFound, filter_groups, is_owner
from quiver.gateway.http import HttpHead, HttpRequest, HttpResponse
from quiver.gateway.http.messages import REQUEST_ID
from quiver.manager.describe_groups import find_topics
from quiver.metadata import View
from quiver.model import ConsumerId, ProducerId
from quiver.security import Principal, parse_principal
from quiver.security.identity import ConnectionIdentity
from quiver.security.permissions import Permissions, ResourceKind, Verb

RouteRule = Callable[[Permissions, View, Any], None]
"""Raise `NotAllowedError` unless a call is allowed."""
FILTERED = (
    console_contract.TopicSummariesAnswer,
    console_contract.DeletedTopicsAnswer,
    console_contract.HoldsAnswer,
)
"""Answers with a list of items that each belong to a topic."""
_PLAIN = re.compile(r"[A-Za-z0-9._:/+=-]{1,64}")
"""What is repeated of a request id."""


def _public(*_: object) -> None:
    """Allow everybody."""


def _known(permissions: Permissions, _: View, __: object) -> None:
    require_known(permissions)


_VERBS: dict[RouteRule, Verb] = {}
"""What a rule asks for; those that are not here ask for no verb, or for several."""


def _cluster(verb: Verb) -> RouteRule:
    def rule(permissions: Permissions, _: View, __: object) -> None:
        require(permissions, verb, ResourceKind.CLUSTER)

    _VERBS[rule] = verb
    return rule


def _topic(verb: Verb) -> RouteRule:
    def rule(permissions: Permissions, _: View, given: Any) -> None:
        require(permissions, verb, ResourceKind.TOPIC, given.topic)

    _VERBS[rule] = verb
    return rule


def _seen_topic(permissions: Permissions, _: View, given: Any) -> None:
    if not permissions.sees_topic(given.topic):
        raise deny(permissions, f"see topic {given.topic}")


def _create_topic(permissions: Permissions, _: View, given: contract.CreateTopicBody) -> None:
    require(permissions, Verb.CREATE, ResourceKind.TOPIC, given.topic_name or given.topic or "")


def _produce(permissions: Permissions, view: View, given: contract.ProduceBody | contract.ProduceBatchBody) -> None:
    require(permissions, Verb.WRITE, ResourceKind.TOPIC, given.topic)
    row = view.producers.get(ProducerId(given.producer_id))
    if row is None:
        raise _unknown("producer", given.producer_id)
    require_owner(permissions, row, "producer")


def _consume(permissions: Permissions, view: View, given: Any) -> None:
    require(permissions, Verb.READ, ResourceKind.TOPIC, given.topic)
    if given.consumer_id is not None:
        row = view.consumers.get(ConsumerId(given.consumer_id))
        if row is None:
            raise _unknown("consumer", given.consumer_id)
        require_owner(permissions, row, "consumer")


def _queue(permissions: Permissions, view: View, given: queue_contract.ReceiveBody | queue_contract.SettleBody) -> None:
    require(permissions, Verb.READ, ResourceKind.TOPIC, given.topic)
    require_owner(permissions, view.consumer(given.group), "consumer")


def _group(verb: Verb) -> RouteRule:
    def rule(permissions: Permissions, view: View, given: group_contract.GroupQuery) -> None:
        row = view.consumer(given.group)
        if row is None and not permissions.allows(verb, ResourceKind.CONSUMER, given.group):
            raise NotFoundError(f"not done: unknown group {given.group!r}", code="unknown_group")
        if not is_owner(permissions, row):
            require(permissions, verb, ResourceKind.CONSUMER, given.group)

    _VERBS[rule] = verb
    return rule


def _group_records(verb: Verb) -> RouteRule:
    """Return the rule of what is about a group's place in its topics, which are read for it as on the wire."""
    decide = _group(verb)

    def rule(permissions: Permissions, view: View, given: Any) -> None:
        decide(permissions, view, given)
        row, named = view.consumer(given.group), getattr(given, "topic", None)
        if named is not None:
            require(permissions, Verb.READ, ResourceKind.TOPIC, named)
        elif row is not None:
            for topic in find_topics(view, row):
                if is_owner(permissions, row) or permissions.sees_topic(topic):  # others are left out of the answer
                    require(permissions, Verb.READ, ResourceKind.TOPIC, topic)

    _VERBS[rule] = verb
    return rule


def _unknown(kind: str, id_: int) -> NotFoundError:
    """Return the error for a client whose owner is not known here; it may have registered at another node just now."""
    return NotFoundError(f"not done: unknown {kind} {id_}", code=f"unknown_{kind}")


def _pipelines(permissions: Permissions, _: View, __: object) -> None:
    require(permissions, Verb.READ, ResourceKind.TOPIC, RUNS_TOPIC)


def _test_access(permissions: Permissions, _: View, given: access_contract.AccessTestQuery) -> None:
    require_known(permissions)
    if parse_principal(given.principal) != permissions.principal:
        require(permissions, Verb.ADMIN, ResourceKind.CLUSTER)


_VERBS[_create_topic] = Verb.CREATE
_VERBS[_produce] = Verb.WRITE
_VERBS[_seen_topic] = _VERBS[_consume] = _VERBS[_queue] = Verb.READ
_VERBS[_test_access] = Verb.ADMIN
_ADMIN = _cluster(Verb.ADMIN)
ROUTE_RULES: dict[str, RouteRule] = {
    **dict.fromkeys(("welcome", "openapi", "docs", "healthz", "livez", "readyz", "console", "console_file"), _public),
    **dict.fromkeys(("status", "get_metadata", "list_topics", "list_deleted_topics", "list_holds"), _known),
    **dict.fromkeys(("console_session", "console_topics"), _known),
    **dict.fromkeys(("health", "list_brokers", "list_managers", "metrics"), _cluster(Verb.READ)),
    **dict.fromkeys(("list_consumers", "describe_consumer"), _cluster(Verb.READ)),
    **dict.fromkeys(("console_events", "list_events", "list_settings"), _cluster(Verb.READ)),
    **dict.fromkeys(("describe_topic", "list_partitions"), _seen_topic),
    **dict.fromkeys(("explain", "browse_records"), _topic(Verb.READ)),
    "configure_topic": _topic(Verb.CONFIGURE),
    "list_pipelines": _pipelines,
    "restore_topic": _topic(Verb.DELETE),
    "create_topic": _create_topic,
    "delete_topic": _topic(Verb.DELETE),
    "register_producer": _topic(Verb.WRITE),
    **dict.fromkeys(("produce", "produce_batch"), _produce),
    **dict.fromkeys(("register_consumer", "consume", "consume_batch", "get_size", "reset_consumer"), _consume),
    **dict.fromkeys(("receive_jobs", "ack_jobs", "nack_jobs", "extend_jobs", "reject_jobs"), _queue),
    "list_groups": _known,
    "describe_group": _group(Verb.READ),
    **dict.fromkeys(("get_group_lag", "describe_queue"), _group_records(Verb.READ)),
    "reset_group": _group_records(Verb.CONFIGURE),
    **dict.fromkeys(("configure_queue", "delete_group"), _group(Verb.CONFIGURE)),
    **dict.fromkeys(("undrain_broker", "rebalance"), _ADMIN),
    **dict.fromkeys(("drain_broker", "remove_broker", "upgrade_cluster", "add_manager", "remove_manager"), _ADMIN),
    **dict.fromkeys(("list_users", "create_user", "change_user", "delete_user"), _ADMIN),
    **dict.fromkeys(("list_tokens", "create_token", "revoke_token"), _ADMIN),
    **dict.fromkeys(("list_roles", "create_role", "delete_role", "add_member", "remove_member"), _ADMIN),
    **dict.fromkeys(("list_acls", "add_acl", "remove_acl"), _ADMIN),
    "test_acl": _test_access,
    **dict.fromkeys(("list_quotas", "set_quota", "remove_quota"), _ADMIN),
}
"""The rule of every route; a route without one cannot be bound."""


class HttpAccess:
    """Decide about HTTP requests."""

    def __init__(self, control: AccessControl, authenticator: Authenticator) -> None:
        self._control = control
        self._authenticator = authenticator

    def identify(
        self, request: HttpRequest | HttpHead, *, is_final: bool = True
    ) -> tuple[ConnectionIdentity, Permissions]:
        """Return who sent a request, and what they may do.

        Raises:
            NotAllowedError: the credentials are not valid.
            UnappliedTokenError: unless `is_final`, this node may not know them yet: `catch_up`, then ask again.
        """
        authorization = request.headers.get(b"authorization")
        request_id = partial(request_id_of, request)
        identity = self._authenticator.identify_http(authorization, request.identity, request_id, is_final=is_final)
        return identity, self._control.permissions(identity)

    async def catch_up(self, request: HttpRequest) -> None:
        """Wait, within bounds, until this node has applied the tokens that there are now."""
        await self._authenticator.catch_up(request.identity.address)

    def principal_of(self, request: HttpRequest | HttpHead) -> Principal:
        """Return the principal of credentials that were checked before; anonymous for others. Cheap."""
        return self._authenticator.principal_of(request.headers.get(b"authorization"), request.identity)

    def check_early(
        self, name: str, identity: ConnectionIdentity, permissions: Permissions, request: HttpRequest
    ) -> None:
        """Raise `NotAllowedError` for somebody who may do nothing at all, before the body of a call is decoded."""
        if ROUTE_RULES[name] is not _public:
            self._control.check_early(identity, permissions, partial(_describe, name, None, request))

    def check(
        self, name: str, identity: ConnectionIdentity, permissions: Permissions, given: object, request: HttpRequest
    ) -> None:
        """Raise `NotAllowedError` unless a call is allowed; a denial is recorded.

        Raises:
            NotFoundError: this node does not know the client that the call names; catch up, then check again.
        """
        if permissions.is_admin:
            return
        try:
            ROUTE_RULES[name](permissions, self._control.view(), given)
        except NotAllowedError as error:
            self._control.note_denial(identity, _describe(name, given, request), error)
            raise

    def note_change(
        self, name: str, identity: ConnectionIdentity, given: object, outcome: str, request: HttpRequest
    ) -> None:
        """Record the outcome of an administrative change."""
        self._control.note_change(identity, _describe(name, given, request), outcome)

    def filter(
        self, permissions: Permissions, answer: contract.Answer | HttpResponse
    ) -> contract.Answer | HttpResponse:
        """Return an answer without the topics and groups that the caller may not see."""
        if permissions.is_admin:
            return answer
        if isinstance(answer, GroupsFound):
            return filter_groups(permissions, self._control.view(), answer)
        if isinstance(answer, contract.TopicsAnswer):
            seen = [topic for topic in answer.topics if permissions.sees_topic(topic)]
            return msgspec.structs.replace(answer, topics=seen)
        if isinstance(answer, FILTERED):
            field = "holds" if isinstance(answer, console_contract.HoldsAnswer) else "topics"
            shown = [one for one in getattr(answer, field) if permissions.sees_topic(one.topic)]
            return msgspec.structs.replace(answer, **{field: shown})
        if isinstance(answer, contract.NodeStatusAnswer) and not permissions.allows(Verb.READ, ResourceKind.CLUSTER):
            problems = [one for one in answer.problems if one.topic is None or permissions.sees_topic(one.topic)]
            return msgspec.structs.replace(answer, problems=problems)
        return answer


def request_id_of(request: HttpRequest | HttpHead) -> str:
    """Return the `X-Request-Id` of a request; one that has none, or one that is not plain text, gets a random one."""
    given = request.headers.get(REQUEST_ID, b"").decode("latin-1")
    if not _PLAIN.fullmatch(given):
        given = secrets.token_hex(8)
        request.headers[REQUEST_ID] = given.encode()
    return given


def _describe(name: str, given: object, request: HttpRequest) -> AuditedOperation:
    verb = _VERBS.get(ROUTE_RULES[name])
    return AuditedOperation(
        request=name,
        verb="" if verb is None else verb.value,
        resource=_describe_resource(given),
        request_id=request_id_of(request),
        address=request.identity.address,
    )


def _describe_resource(given: object) -> str:
    """Return in a few words what a call is about, for the audit log; never a secret."""
    for field in ("topic", "topic_name", "group", "user", "role", "token_id", "subject", "id"):
        value = getattr(given, field, None)
        if value is not None:
            return f"{field.removesuffix('_name')} {value}"
    return ""
