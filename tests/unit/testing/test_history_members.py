"""What the history checker says of members of groups."""

from __future__ import annotations

from history_script import Script


class GroupScript(Script):
    """Members of one group, in a partition with the records a and b."""

    def __init__(self) -> None:
        super().__init__()
        self.send("p", "a b", 0)

    def grant(self, member: str, epoch: int, offset: int) -> None:
        self.note(member, "grant", {"consumer": "g", "member": member, "epoch": epoch, "offset": offset})

    def read(self, member: str, epoch: int, first: int, values: str) -> None:
        records = [[offset, value] for offset, value in enumerate(values.split(), first)]
        argument = {"consumer": "g", "max": 2, "offset": first, "epoch": epoch, "member": member}
        self.call(member, "consume", argument, records)

    def commit(self, member: str, epoch: int, offset: int, *, kind: str = "ok") -> None:
        self.call(member, "commit", {"consumer": "g", "offset": offset, "epoch": epoch}, None, kind=kind)


def test_partition_that_changes_hands_is_in_order() -> None:
    script = GroupScript()
    script.grant("m1", 1, 0)
    script.read("m1", 1, 0, "a b")
    script.commit("m1", 1, 1)
    script.grant("m2", 2, 1)
    script.read("m2", 2, 1, "b")
    script.commit("m1", 1, 2, kind="info")
    script.read("m1", 1, 0, "a b")  # prefetched before
    assert script.found() == {}
    assert script.check().facts["grants"] == 2


def test_finds_two_members_at_one_epoch() -> None:
    script = GroupScript()
    script.grant("m1", 1, 0)
    script.grant("m2", 1, 0)
    assert script.found() == {"epoch-shared": 1}


def test_finds_commit_of_a_zombie() -> None:
    script = GroupScript()
    script.grant("m1", 1, 0)
    script.grant("m2", 3, 0)
    script.grant("m3", 2, 0)
    script.commit("m1", 1, 0)
    assert script.found() == {"zombie-commit": 1}


def test_finds_record_that_a_zombie_was_given() -> None:
    script = GroupScript()
    script.grant("m1", 1, 0)
    script.grant("m2", 2, 0)
    script.send("p", "c", 2)
    script.read("m1", 1, 0, "a b c")
    assert script.found() == {"zombie-read": 1}


def test_finds_commit_that_was_undone() -> None:
    script = GroupScript()
    script.grant("m1", 1, 0)
    script.read("m1", 1, 0, "a b")
    script.commit("m1", 1, 2)
    script.grant("m2", 2, 1)
    assert script.found() == {"commit-undone": 1}


def test_finds_record_that_no_member_was_given() -> None:
    script = GroupScript()
    script.grant("m1", 1, 0)
    script.read("m1", 1, 0, "a")
    script.grant("m2", 2, 2)
    script.cursor("g", 2)
    assert script.found() == {"undelivered": 1, "cursor-passed": 1}
