"""`quiver recover`: go on after a majority of the nodes was lost for good."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from quiver.cli.metadata import find_nodes
from quiver.cli.options import examples, json_option, load_keys
from quiver.cli.output import print_json, print_table
from quiver.operations.recover import RecoveryPlan, carry_out, check_name, lock_directories, make_plan
from quiver.operations.survivors import StoppedNodes

if TYPE_CHECKING:
    from quiver.security.key_ring import KeyRing


@click.command(
    short_help="Go on after a majority was lost for good.",
    epilog=examples(
        "quiver recover --data /var/lib/quiver --plan", "quiver recover --data /var/lib/quiver --yes-lose-data logs"
    ),
)
@click.option(
    "--data",
    required=True,
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="Data directory of a surviving node, which is stopped; name every survivor's.",
)
@click.option("--node", "only", type=int, multiple=True, help="Only these nodes of a directory that holds several.")
@click.option("--plan", "is_plan", is_flag=True, help="Print what would be done, and what may be lost; do nothing.")
@click.option("--yes-lose-data", "name", metavar="CLUSTER", help="Do it; type the name of the cluster.")
@click.option(
    "--encryption-key-file",
    "key_files",
    multiple=True,
    metavar="FILE",
    help="Key file of a node, if any topic is encrypted.",
)
@json_option
def recover(
    *,
    data: tuple[str, ...],
    only: tuple[int, ...],
    is_plan: bool,
    name: str | None,
    key_files: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make the surviving nodes a cluster of their own, without the nodes that are lost for good.

    Every node of the cluster whose directory is not named counts as lost. Acknowledged records that only lost nodes had
    are lost; the plan says for each partition where its survivors end. A lost node that returns is refused: erase its
    data. Restore from a backup instead if that loses less.
    """
    if is_plan == (name is not None):
        raise click.UsageError("give either --plan or --yes-lose-data CLUSTER")
    directories = [
        path for one in data for path, identity in find_nodes(one).items() if not only or identity.node in only
    ]
    if not directories:
        raise click.UsageError(f"--data holds no data of the nodes {list(only)}")
    with ExitStack() as stack:
        lock_directories(stack, directories)
        plan = asyncio.run(_recover(directories, name, load_keys(*key_files) if key_files else None))
    if as_json:
        print_json(plan)
        return
    _print_plan(plan)
    if name is not None:
        click.echo(f"recovered: start node {plan.manager} first, with the role manager, then the other survivors")


async def _recover(directories: list[str], name: str | None, keys: KeyRing | None) -> RecoveryPlan:
    async with StoppedNodes(keys) as nodes:
        plan = await make_plan(nodes, directories)
        if name is not None:
            check_name(plan, name)
            await carry_out(nodes, plan, directories, now_ms=time.time_ns() // 1_000_000)
        return plan


def _print_plan(plan: RecoveryPlan) -> None:
    click.echo(f"cluster {plan.cluster}: survivors {_names(plan.survivors)}, lost for good {_names(plan.lost)}")
    state = "still has" if plan.has_managers else "has lost"
    click.echo(
        f"metadata: {state} its majority; node {plan.manager} goes on as the only manager, from index "
        f"{plan.metadata.last_index} of term {plan.metadata.last_term} (known committed: {plan.metadata.commit_index})."
        " Later changes, if any, are lost"
    )
    click.echo(f"{plan.kept} partitions still have a majority and lose nothing")
    rows = [
        (
            one.topic,
            one.partition,
            " ".join(map(str, one.replicas)),
            None if one.best is None else one.best.first_offset,
            None if one.best is None else one.best.end_offset,
            one.may_lose,
        )
        for one in plan.partitions
    ]
    if rows:
        print_table(("topic", "partition", "goes on with", "first offset", "end offset", "may lose"), rows)


def _names(nodes: tuple[int, ...]) -> str:
    return ", ".join(map(str, nodes)) or "none"
