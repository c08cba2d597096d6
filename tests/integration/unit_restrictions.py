"""Run a program under the restrictions of a systemd unit that can be had without systemd:

    python unit_restrictions.py quiver.service PROGRAM ARGUMENTS...

No new privileges, no memory that is both writable and executable, no capabilities, the unit's umask, and its filter of
system calls and address families, which the kernel applies by seccomp as it does for systemd.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import socket
import subprocess
import sys
from configparser import RawConfigParser

PR_SET_NO_NEW_PRIVS, PR_SET_MDWE, PR_CAPBSET_DROP = 38, 65, 24
MDWE_REFUSE_EXEC_GAIN = 1
CAPABILITIES = 64
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EPERM
EQUAL = 4
ALWAYS = {"execve", "exit", "exit_group", "getrlimit", "rt_sigreturn", "sigreturn", "clock_gettime", "gettimeofday"}
"""What systemd allows whatever a unit says, as far as a program needs it."""


class Comparison(ctypes.Structure):
    """A condition on an argument of a system call (`scmp_arg_cmp`)."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class UnitParser(RawConfigParser):
    """Reads a unit: names keep their case, and of a setting that is given twice both values count."""

    def __init__(self, path: str) -> None:
        super().__init__(strict=False)
        self.filters: list[str] = []
        with open(path, encoding="utf-8") as file:
            for line in file:
                name, _, value = line.strip().partition("=")
                if name == "SystemCallFilter":
                    self.filters.append(value)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read(path)


def expand(name: str) -> set[str]:
    """Return the system calls of a set such as @system-service, by systemd's own list."""
    if not name.startswith("@"):
        return {name}
    shown = subprocess.run(["systemd-analyze", "syscall-filter", name], stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.strip() for line in shown.stdout.splitlines()[1:]]
    parts = [line for line in lines if line and not line.startswith("#")]
    return {call for part in parts for call in expand(part)}


def find_allowed(filters: list[str]) -> set[str]:
    allowed: set[str] = set()
    for one in filters:
        calls = {call for name in one.removeprefix("~").split() for call in expand(name)}
        allowed = allowed - calls if one.startswith("~") else allowed | calls
    return allowed | ALWAYS


def restrict(unit: UnitParser) -> None:
    """Restrict this process, and all that it starts."""
    service, libc = unit["Service"], ctypes.CDLL(None, use_errno=True)
    allowed = find_allowed(unit.filters)
    os.umask(int(service["UMask"], 8))
    assert service["CapabilityBoundingSet"] == ""
    for number in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # fails for numbers that this kernel does not know
    assert service["NoNewPrivileges"] == service["MemoryDenyWriteExecute"] == "true"
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    if libc.prctl(PR_SET_MDWE, MDWE_REFUSE_EXEC_GAIN, 0, 0, 0):
        sys.stderr.write("this kernel cannot refuse writable memory that is executable\n")
    _filter(allowed, [getattr(socket, name) for name in service["RestrictAddressFamilies"].split()])


def _filter(allowed: set[str], families: list[int]) -> None:
    library = ctypes.CDLL(ctypes.util.find_library("seccomp"))
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(DENY)))
    for name in sorted(allowed - {"socket"}):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # others are not of this machine
            assert library.seccomp_rule_add_array(context, ctypes.c_uint32(ALLOW), number, 0, None) == 0
    call = library.seccomp_syscall_resolve_name(b"socket")
    for family in families:
        condition = Comparison(0, EQUAL, family, 0)
        assert library.seccomp_rule_add_array(context, ctypes.c_uint32(ALLOW), call, 1, ctypes.byref(condition)) == 0
    assert library.seccomp_load(context) == 0


if __name__ == "__main__":
    restrict(UnitParser(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
