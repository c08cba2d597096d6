"""The routes of consumer groups; see `routes`."""

from __future__ import annotations

from quiver.gateway import group_contract
from quiver.gateway.http_route import HttpRoute

GROUP_ROUTES: tuple[HttpRoute, ...] = (
    HttpRoute(
        name="list_groups",
        method="GET",
        path="/groups",
        section="Groups",
        summary="List the consumer groups; a named consumer is a group of one.",
        parameters=group_contract.GroupsQuery,
        answer=group_contract.GroupsAnswer,
        failures=(422,),
    ),
    HttpRoute(
        name="describe_group",
        method="GET",
        path="/groups/{group}",
        section="Groups",
        summary="Describe a group: its members, their partitions with epochs, the last rebalance and its reason.",
        parameters=group_contract.GroupDetailQuery,
        answer=group_contract.GroupAnswer,
        failures=(404, 422),
    ),
    HttpRoute(
        name="get_group_lag",
        method="GET",
        path="/groups/{group}/lag",
        section="Groups",
        summary="Count the messages that a group has not consumed yet, by partition.",
        parameters=group_contract.GroupLagQuery,
        answer=group_contract.GroupLagAnswer,
        failures=(404, 422, 504),
    ),
    HttpRoute(
        name="describe_queue",
        method="GET",
        path="/groups/{group}/queue",
        section="Groups",
        summary="Describe a work queue: its settings, and what is ready, leased, waiting and dying, by partition.",
        parameters=group_contract.GroupDetailQuery,
        answer=group_contract.QueueAnswer,
        failures=(404, 409, 422, 504),
    ),
    HttpRoute(
        name="configure_queue",
        method="POST",
        path="/groups/{group}/queue",
        section="Groups",
        summary="Change settings of a work queue for all its workers; those that are not given stay.",
        parameters=group_contract.QueueSettingsBody,
        failures=(404, 409, 422, 504),
        changes=True,
        is_signed=True,
    ),
    HttpRoute(
        name="reset_group",
        method="POST",
        path="/groups/{group}/reset",
        section="Groups",
        summary="Move a group's cursors: give one of `to`, `offset`, `timestamp` and `shift`.",
        parameters=group_contract.GroupResetBody,
        answer=group_contract.GroupResetAnswer,
        failures=(404, 409, 422, 504),
        changes=True,
        is_signed=True,
    ),
    HttpRoute(
        name="delete_group",
        method="DELETE",
        path="/groups/{group}",
        section="Groups",
        summary="Delete a group with its cursors.",
        parameters=group_contract.GroupDeleteQuery,
        failures=(404, 409, 422, 504),
        changes=True,
        is_signed=True,
    ),
)
