"""Programs that the hosts of cluster_walk.py lack: no systemd, no SSH server and one user only are in a namespace.

    python host_stand_ins.py scp -r quiver-security/node-2 root@10.0.0.2:/etc/quiver

An argument that is not known here is an error: a page that begins to use one needs another line here. The environment
says where things are: `WALK_HOSTS` the processes and homes of hosts by address, `WALK_RUN` a folder of this host.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from configparser import RawConfigParser
from pathlib import Path

STOP_TIMEOUT_S = 60


def provide(directory: Path) -> None:
    """Write the programs."""
    directory.mkdir()
    for name in PROGRAMS:
        program = directory / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        program.chmod(0o755)


def run_scp(arguments: list[str]) -> int:
    """Copy files to another host, or from one; modes stay, as with a usual umask."""
    parser = argparse.ArgumentParser(prog="scp", allow_abbrev=False)
    parser.add_argument("-r", dest="is_recursive", action="store_true")
    parser.add_argument("sources", nargs="+")
    parser.add_argument("target")
    given = parser.parse_args(arguments)
    target = _locate(given.target)
    for source in map(_locate, given.sources):
        if source.is_dir():
            assert given.is_recursive, f"{source} is a directory"
            shutil.copytree(source, target / source.name if target.is_dir() else target)
        else:
            shutil.copy(source, target)
    return 0


def _locate(name: str) -> Path:
    """Return the path at which a file of any host is found from here."""
    host, colon, path = name.rpartition(":")
    if not colon:
        return Path(path)
    found = json.loads(os.environ["WALK_HOSTS"])[host.removeprefix("root@")]
    return Path(f"/proc/{found['process']}/root{Path(found['home']) / path}")


def run_useradd(arguments: list[str]) -> int:
    """Accept the user of the unit. There is one user in a namespace, who does everything."""
    assert (arguments[0], arguments[-1]) == ("--system", "quiver"), arguments
    assert set(arguments[1:-1:2]) == {"--home-dir", "--shell"}, arguments
    return 0


def run_chown(arguments: list[str]) -> int:
    """Accept what gives existing files to that user."""
    assert arguments[:2] == ["-R", "quiver:"], arguments
    return 0 if all(Path(path).exists() for path in arguments[2:]) else 1


def run_systemctl(arguments: list[str]) -> int:
    """Start the program of a unit, which must be installed, stop it, or both."""
    match arguments:
        case ["enable", "--now", unit]:
            _start(unit)
        case ["disable", "--now", unit]:
            _stop(unit)
        case ["restart", unit]:
            _stop(unit)
            _start(unit)
        case _:
            raise AssertionError(arguments)
    return 0


def _start(unit: str) -> None:
    parser = RawConfigParser(strict=False)
    assert parser.read(f"/etc/systemd/system/{unit}.service"), f"unit {unit} is not installed"
    service, run = parser["Service"], Path(os.environ["WALK_RUN"])
    os.umask(int(service["UMask"], 8))
    with (run / f"{unit}.log").open("ab") as log:
        command = shlex.split(service["ExecStart"])
        environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/", start_new_session=True
        )
    (run / f"{unit}.pid").write_text(str(process.pid))


def _stop(unit: str) -> None:
    pid = int((Path(os.environ["WALK_RUN"]) / f"{unit}.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + STOP_TIMEOUT_S
    while _is_running(pid):
        assert time.monotonic() < end, "the unit does not stop"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


PROGRAMS = {"scp": run_scp, "useradd": run_useradd, "chown": run_chown, "systemctl": run_systemctl}

if __name__ == "__main__":
    sys.exit(PROGRAMS[sys.argv[1]](sys.argv[2:]))
