"""The part of the HTTP contract about users, tokens, roles, grants and quotas; see `contract`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.gateway.contract import NUMBER_MAX, Answer, Parameters
from quiver.model import TOPIC_NAME_PATTERN
from quiver.security.limits import LIMIT_MAX, WEIGHT_MAX, QuotaLimits
from quiver.security.permissions import ResourceKind, Verb
from quiver.security.scram import PASSWORD_LENGTH_MAX, PASSWORD_LENGTH_MIN

AccountName = Annotated[
    str,
    Meta(
        max_length=100,
        description="1 to 100 of letters, digits, `.`, `_`, `@` and `-`, beginning with a letter or digit.",
        examples=["alice"],
        extra_json_schema={"minLength": 1, "pattern": "^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$"},
    ),
]
Password = Annotated[
    str,
    Meta(min_length=PASSWORD_LENGTH_MIN, max_length=PASSWORD_LENGTH_MAX, extra_json_schema={"format": "password"}),
]
Subject = Annotated[
    str,
    Meta(
        max_length=120,
        description="`user:<name>`, `role:<name>` or `anonymous`.",
        examples=["user:alice"],
        extra_json_schema={"pattern": "^(?:anonymous|(?:user|role):[A-Za-z0-9][A-Za-z0-9._@-]{0,99})$"},
    ),
]

QuotaSubject = Annotated[
    str,
    Meta(
        max_length=220,
        description="`user:<name>`, `role:<name>`, `anonymous`, `default` for every principal, `topic:<name>`, or "
        "`topic:*` for every topic.",
        examples=["user:alice"],
        extra_json_schema={
            "pattern": "^(?:anonymous|default|(?:user|role):[A-Za-z0-9][A-Za-z0-9._@-]{0,99}"
            rf"|topic:\*|topic:{TOPIC_NAME_PATTERN})$"
        },
    ),
]
Limit = Annotated[int, Meta(ge=0, le=LIMIT_MAX)]


class UserQuery(Parameters, frozen=True):
    """A user, in the path."""

    user: AccountName


class CreateUserBody(Parameters, frozen=True):
    """A user to create."""

    user: AccountName
    password: Annotated[Password | None, Meta(description="For SCRAM on the wire; default: tokens only.")] = None


class ChangeUserBody(Parameters, frozen=True):
    """What changes of a user; what is not given stays."""

    user: AccountName
    is_enabled: Annotated[bool | None, Meta(description="A disabled user cannot log in.")] = None
    password: Password | None = None


class TokenItem(msgspec.Struct, frozen=True, kw_only=True):
    """A token, without its secret."""

    token_id: str
    user: str
    created_ms: int
    expires_ms: int | None


class UserItem(msgspec.Struct, frozen=True, kw_only=True):
    """A user with its roles and tokens."""

    user: str
    is_enabled: bool
    has_password: bool
    created_ms: int
    roles: list[str]
    tokens: list[TokenItem]


class UsersAnswer(Answer, frozen=True):
    """All users, by name."""

    users: list[UserItem]


class TokensQuery(Parameters, frozen=True):
    """Whose tokens to list."""

    user: Annotated[AccountName | None, Meta(description="Default: those of all users.")] = None


class TokensAnswer(Answer, frozen=True):
    """Tokens."""

    tokens: list[TokenItem]


class CreateTokenBody(Parameters, frozen=True):
    """A token to create."""

    user: AccountName
    lasting_ms: Annotated[
        Annotated[int, Meta(ge=1, le=NUMBER_MAX // 2)] | None, Meta(description="Default: it does not expire.")
    ] = None


class TokenCreatedAnswer(Answer, frozen=True):
    """A new token. It is shown this once: the cluster stores only its hash."""

    token_id: str
    token: str
    expires_ms: int | None


class TokenQuery(Parameters, frozen=True):
    """A token, in the path, by its id."""

    token_id: Annotated[str, Meta(max_length=16, extra_json_schema={"pattern": "^[0-9a-f]{16}$"})]


class RoleQuery(Parameters, frozen=True):
    """A role."""

    role: AccountName


class MemberQuery(Parameters, frozen=True):
    """A role and a user, in the path."""

    role: AccountName
    user: AccountName


class RoleItem(msgspec.Struct, frozen=True, kw_only=True):
    """A role and the users that have it."""

    role: str
    users: list[str]


class RolesAnswer(Answer, frozen=True):
    """All roles, by name."""

    roles: list[RoleItem]


class GrantsQuery(Parameters, frozen=True):
    """Whose grants to list."""

    subject: Annotated[Subject | None, Meta(description="Default: those of all subjects.")] = None


class GrantBody(Parameters, frozen=True):
    """A grant: its subject may do a verb on resources of a kind, by name or by prefix of the name."""

    subject: Subject
    verb: Verb
    kind: ResourceKind = ResourceKind.TOPIC
    name: Annotated[
        str,
        Meta(
            max_length=300,
            description="Without control characters; empty for the cluster.",
            extra_json_schema={"pattern": r"^[^\x00-\x1f\x7f-\x9f]*$"},
        ),
    ] = ""
    is_prefix: Annotated[bool, Meta(description="Whether it is for all names that begin with `name`.")] = False


class GrantItem(msgspec.Struct, frozen=True, kw_only=True):
    """A grant."""

    subject: str
    verb: Verb
    kind: ResourceKind
    name: str
    is_prefix: bool


class GrantsAnswer(Answer, frozen=True):
    """Grants, sorted."""

    grants: list[GrantItem]


class QuotasQuery(Parameters, frozen=True):
    """Whose quotas to list."""

    subject: Annotated[QuotaSubject | None, Meta(description="Default: those of all subjects.")] = None


class QuotaQuery(Parameters, frozen=True):
    """Whose quotas to remove."""

    subject: QuotaSubject


class QuotaBody(Parameters, frozen=True):
    """Limits of a subject: 0 is no limit, and what is not given stays as it is."""

    subject: QuotaSubject
    requests_per_second: Limit | None = None
    mutations_per_second: Annotated[Limit | None, Meta(description="Requests that change something.")] = None
    bytes_in_per_second: Limit | None = None
    bytes_out_per_second: Limit | None = None
    creations_per_minute: Annotated[
        Limit | None, Meta(description="Topics, producers and consumers that are created.")
    ] = None
    long_polls_max: Annotated[Limit | None, Meta(description="Requests that wait for messages, for each node.")] = None
    connections_max: Annotated[Limit | None, Meta(description="Connections of the wire protocol, for each node.")] = (
        None
    )
    topics_max: Annotated[
        Limit | None, Meta(description="Topics that a user owns; deleted ones count until they are purged.")
    ] = None
    partitions_max: Annotated[Limit | None, Meta(description="Partitions of these topics.")] = None
    registrations_max: Annotated[Limit | None, Meta(description="Producers, consumers and holds of a user.")] = None
    weight: Annotated[
        Annotated[int, Meta(ge=1, le=WEIGHT_MAX)] | None,
        Meta(description="Share of the turns while a node has more to do than it can; 1 if it is never set."),
    ] = None


class QuotaItem(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a subject that are set."""

    subject: str
    limits: QuotaLimits
    changed_ms: int


class QuotasAnswer(Answer, frozen=True):
    """Quotas, by subject."""

    quotas: list[QuotaItem]


class AccessTestQuery(Parameters, frozen=True):
    """What somebody would like to do."""

    principal: Annotated[
        str,
        Meta(
            max_length=120,
            description="`user:<name>`, or only the name, or `anonymous`.",
            examples=["alice"],
            extra_json_schema={"pattern": "^(?:user:)?[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$"},
        ),
    ]
    verb: Verb
    kind: ResourceKind = ResourceKind.TOPIC
    name: Annotated[str, Meta(max_length=300)] = ""


class AccessTestAnswer(Answer, frozen=True):
    """The verdict, and the grant that decides it."""

    is_allowed: bool
    reason: str
    grant: GrantItem | None
