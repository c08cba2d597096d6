"""`quiver backup`: copy topics with their clients to a folder, check the folder, and restore it."""

from __future__ import annotations

import asyncio

import click
import msgspec

from quiver.cli.options import connect_async, json_option, url_option
from quiver.cli.output import FOUND, format_count, print_json
from quiver.operations.backup import create_backup
from quiver.operations.backup_folder import BackupCounts, Manifest, count_content, read_cluster, read_manifest
from quiver.operations.restore import describe_shift, restore_backup, verify_backup

_TOPICS = click.option("--topic", "topics", metavar="TOPIC", multiple=True, help="Only this topic; may be repeated.")
_FOLDER = click.Path(file_okay=False)


@click.group(epilog="Example: quiver backup create --to /backup/monday --all")
def backup() -> None:
    """Back up topics to a folder, check a backup, and restore it into another cluster."""


@backup.command("create", epilog="Example: quiver backup create --to /backup/monday --topic logs --topic audit")
@click.option("--to", "folder", type=_FOLDER, required=True, help="Empty or new folder.")
@_TOPICS
@click.option("--all", "is_all", is_flag=True, help="All topics, except internal ones, such as quiver.audit.")
@json_option
@url_option
def create(*, folder: str, topics: tuple[str, ...], is_all: bool, as_json: bool, url: str) -> None:
    """Copy the committed records of topics, their configuration, named producers and consumers, and quotas.

    Consumers with their cursors, queues with their settings; all with their owners. Nobody is interrupted; a hold keeps
    retention away meanwhile. What is not in the backup is said: see "left out". The manifest is written last: a folder
    without it is an interrupted backup, and is refused by `verify` and `restore`.
    """
    if bool(topics) == is_all:
        raise click.UsageError("give --topic, or --all")
    manifest = asyncio.run(_create(folder, topics, as_json=as_json, url=url))
    content = read_cluster(folder)
    counts = count_content(content)
    if as_json:
        saved = msgspec.structs.asdict(manifest) | msgspec.structs.asdict(counts)
        print_json(saved | {"left_out": content.left_out})
        return
    for sentence in content.left_out:
        click.echo(f"left out: {sentence}")
    click.echo(f"backed up {_describe(counts)} to {folder}")


@backup.command("verify", epilog="Example: quiver backup verify /backup/monday")
@click.argument("folder", type=_FOLDER)
@json_option
@click.pass_context
def verify(context: click.Context, *, folder: str, as_json: bool) -> None:
    """Check that every file of the backup in FOLDER is there and unchanged; exit with 1 if not. Needs no cluster."""
    damage = verify_backup(folder)
    manifest = read_manifest(folder)
    if as_json:
        print_json({"folder": folder, "records": manifest.records, "files": len(manifest.files), "damage": damage})
    else:
        for sentence in damage:
            click.echo(sentence)
        whole = f"whole: {len(manifest.files)} files, {format_count(manifest.records, 'record')}"
        click.echo(f"{len(damage)} of {len(manifest.files)} files are damaged" if damage else whole)
    if damage:
        context.exit(FOUND)


@backup.command("restore", epilog="Example: quiver backup restore --from /backup/monday --url http://10.0.1.1:8002")
@click.option("--from", "folder", type=_FOLDER, required=True, help="Folder of a backup.")
@_TOPICS
@url_option
def restore(*, folder: str, topics: tuple[str, ...], url: str) -> None:
    """Create the topics of a backup, or those named, with their records and clients, and compare them with the backup.

    Refused if one of the topics exists. Offsets stay the same where the partition began at offset 0; otherwise they
    begin again at 0, and cursors move with them. An administrator also restores owners and, with all topics, quotas.
    Create users and roles before. Internal topics are restored only if they are named.
    """
    counts = asyncio.run(_restore(folder, topics, url))
    for topic, shifts in describe_shift(read_cluster(folder)).items():
        if not topics or topic in topics:
            shown = ", ".join(f"partition {part} by {by}" for part, by in shifts.items())
            click.echo(f"{topic}: offsets are lower than in the source: {shown}")
    click.echo(f"restored {_describe(counts)}")


def _describe(counts: BackupCounts) -> str:
    """Return counts in words."""
    cursors = f" with {format_count(counts.cursors, 'cursor')}" if counts.consumers else ""
    return (
        f"{format_count(counts.records, 'record')} of {format_count(counts.topics, 'topic')}, "
        f"{format_count(counts.producers, 'producer')}, {format_count(counts.consumers, 'consumer')}{cursors}, "
        f"{format_count(counts.quotas, 'quota')}"
    )


async def _create(folder: str, topics: tuple[str, ...], *, as_json: bool, url: str) -> Manifest:
    async with connect_async(url) as cluster:
        return await create_backup(cluster, folder, topics, (lambda _: None) if as_json else click.echo)


async def _restore(folder: str, topics: tuple[str, ...], url: str) -> BackupCounts:
    async with connect_async(url) as cluster:
        return await restore_backup(cluster, folder, topics, click.echo)
