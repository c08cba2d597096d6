"""Run parts of the container image as plain processes, where there is no container runtime. Run as root:

    unshare --mount --net --pid --fork --kill-child python container_stand_in.py SCRATCH

Inside these namespaces the paths of the image exist: /opt/quiver, /usr/local/lib/quiver, /var/lib/quiver, /srv/quiver.
Everything else is read-only. Services of compose.yaml run with their own commands, environment, user and rights; what
differs from the image is that Python and its packages are this machine's, and that nodes, which share a network here,
listen on addresses of their own. It prints a JSON object with what it found.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
HOSTS = {"quiver-1": "127.0.1.1", "quiver-2": "127.0.1.2", "quiver-3": "127.0.1.3"}
POD = "quiver-0.quiver-headless.logs.svc.cluster.local"
LIMIT_S = 120
LIBRARY = Path("/usr/local/lib/quiver")


@cache
def read_dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile and their arguments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line]


def image_environment() -> dict[str, str]:
    """Return the variables that the final stage of the image sets."""
    instructions = read_dockerfile()
    last = max(at for at, (name, _) in enumerate(instructions) if name == "FROM")
    pairs = [pair for name, rest in instructions[last:] if name == "ENV" for pair in rest.split()]
    return dict(pair.split("=", 1) for pair in pairs)


def image_user() -> str:
    """Return the user and group of the image."""
    return next(rest for name, rest in reversed(read_dockerfile()) if name == "USER")


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def make_image(scratch: Path) -> None:
    """Give this mount namespace the paths of the image, and make the rest read-only."""
    mount("--make-rprivate", "/")
    etc = scratch / "etc"
    shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
    (etc / "quiver").mkdir()
    names = {"localhost": "127.0.0.1", **HOSTS, POD: "127.0.1.9"}
    (etc / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    mount("--bind", str(etc), "/etc")
    mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/etc/quiver")
    source, base, sites = ROOT / "src", sys.base_prefix, next(path for path in sys.path if path.endswith("-packages"))
    kept = {}
    for name, path in (("src", source), ("deploy", ROOT / "deploy"), ("python", Path(base)), ("packages", Path(sites))):
        kept[name] = scratch / "kept" / name
        kept[name].mkdir(parents=True)
        mount("--bind", str(path), str(kept[name]))
    for place in ("/opt", "/usr/local/lib", "/var/lib", "/srv"):
        mount("-t", "tmpfs", "tmpfs", place)
    for name, path in kept.items():
        target = Path("/opt/quiver") / name
        target.mkdir(parents=True)
        mount("--bind", str(path), str(target))
    _write_program("quiver", 'exec /opt/quiver/python/bin/python3 -m quiver "$@"')
    _write_program("python", 'exec /opt/quiver/python/bin/python3 "$@"')
    if tini := shutil.which(os.environ.get("TINI", "tini")):
        shutil.copy(tini, "/opt/quiver/bin/tini")
    LIBRARY.mkdir()
    for name in ("entrypoint.sh", "certificates.sh", "setup.sh", "healthcheck.py"):
        shutil.copy(DOCKER / name, LIBRARY / name)
    uid, gid = map(int, image_user().split(":"))
    for place in ("quiver", *HOSTS):  # the volumes
        Path("/srv", place).mkdir(mode=0o700)
        os.chown(Path("/srv", place), uid, gid)
    Path("/var/lib/quiver").mkdir()
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp")
    mount("--bind", "/", "/")
    for place in ("/", "/etc", "/opt", "/usr/local/lib", "/var/lib"):
        mount("-o", "remount,ro,bind", place)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _write_program(name: str, command: str) -> None:
    path = Path("/opt/quiver/bin") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    places = "PYTHONPATH=/opt/quiver/src:/opt/quiver/packages LD_LIBRARY_PATH=/opt/quiver/python/lib"
    path.write_text(f"#!/bin/sh\nexport {places}\n{command}\n")
    path.chmod(0o755)


class Service:
    """A service of compose.yaml, run as a process."""

    def __init__(self, compose: dict[str, Any], name: str) -> None:
        self.name = name
        self._service = compose["services"][name]
        own = {str(key): str(value) for key, value in self._service.get("environment", {}).items()}
        path = f"/opt/quiver/bin:{os.environ['PATH']}"
        self.environment = {"HOSTNAME": name, **image_environment(), **own, "PATH": path}
        if name in HOSTS:  # the nodes share one network here
            self.environment |= {"QUIVER_NODE__WIRE": f"{HOSTS[name]}:9002", "QUIVER_NODE__HTTP": f"{HOSTS[name]}:8002"}

    def command(self) -> list[str]:
        entry = self._service.get("entrypoint")
        if entry is None:
            entry = json.loads(next(rest for name, rest in reversed(read_dockerfile()) if name == "ENTRYPOINT"))
        arguments = self._service.get("command")
        if arguments is None:
            arguments = json.loads(next(rest for name, rest in reversed(read_dockerfile()) if name == "CMD"))
        assert entry[:2] == ["/usr/bin/tini", "--"]
        tini = ["/opt/quiver/bin/tini", "-s", "--"] if Path("/opt/quiver/bin/tini").exists() else []
        return [*tini, *entry[2:], *arguments]

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start it, or another command in the same place, with the rights that it has in a container."""
        uid, gid = image_user().split(":")
        limited = ["setpriv", "--reuid", uid, "--regid", gid, "--clear-groups", "--no-new-privs"]
        limited += ["--bounding-set=-all", "--inh-caps=-all", "--"]
        # Its own data under the path of the image, and the certificates as its volume mounts them.
        volume = f"mount --bind /srv/{self.name} /var/lib/quiver && " if self.name in HOSTS else ""
        is_fixed = any(one.endswith("/srv/quiver:ro") for one in self._service["volumes"])
        fixed = "mount --bind -o ro /srv/quiver /srv/quiver && " if is_fixed else ""
        script = f'{volume}{fixed}cd /var/lib/quiver && exec "$@"'
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, "sh", *limited, *(command or self.command())],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str) -> tuple[int, str]:
        """Run it, or another command in the same place, to its end; return its exit code and output."""
        process = self.start(*command)
        output = process.communicate(timeout=LIMIT_S)[0]
        return process.returncode, output


def wait_healthy(service: Service, node: subprocess.Popen[str], *path: str) -> None:
    """Wait until the health check succeeds, of the image's own path or of another one."""
    check = next(rest for name, rest in reversed(read_dockerfile()) if name == "HEALTHCHECK")
    command = [*json.loads(check.partition("CMD ")[2]), *path]
    end = time.monotonic() + LIMIT_S
    while (found := service.run(*command))[0]:
        assert node.poll() is None, (service.name, node.communicate()[0][-3000:])
        if time.monotonic() > end:
            node.kill()
            raise AssertionError(service.name, found, node.communicate()[0][-3000:])
        time.sleep(0.2)


def scrape(url: str, token: str | None) -> int:
    """Return the status of a request, made as Prometheus makes it for metrics."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    context = ssl.create_default_context(cafile="/srv/quiver/ca.pem")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=context, timeout=30) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code


def scrape_both(url: str, token: str) -> tuple[int, int]:
    """Return the status with a token that was just created, and without one.

    A node accepts the token when it has applied the change, which follows the answer to whoever created it.
    """
    end = time.monotonic() + LIMIT_S
    while (status := scrape(url, token)) == 401 and time.monotonic() < end:
        time.sleep(0.1)
    return status, scrape(url, None)


def describe(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process: who it is and what it may do."""
    status = Path(f"/proc/{pid}/status").read_text()
    return {key: value.strip() for key, value in re.findall(r"^(Uid|CapEff|CapBnd|NoNewPrivs):(.*)$", status, re.M)}


def find_node(parent: int) -> int:
    """Return the process of a node under the one that was started: itself, or the child of tini."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return find_node(int(children[0])) if children else parent


def main(scratch: Path) -> dict[str, Any]:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    read_dockerfile()  # while the sources can still be seen
    make_image(scratch)
    found: dict[str, Any] = {}
    certificates = Service(compose, "certificates")
    found["certificates"] = certificates.run()
    assert found["certificates"][0] == 0, found
    found["certificates again"] = certificates.run()
    services = [Service(compose, name) for name in HOSTS]
    nodes = [service.start() for service in services]
    for service, node in zip(services, nodes, strict=True):
        wait_healthy(service, node)
    found["rights"] = describe(find_node(nodes[0].pid))
    found["write"] = services[0].run("sh", "-c", "touch /srv/quiver/x /opt/x /etc/x /var/lib/x; touch /tmp/x")
    found["wait"] = services[0].run("quiver", "broker", "wait", "1", "2", "3")
    found["setup"] = Service(compose, "setup").run()
    found["setup again"] = Service(compose, "setup").run()
    token = Path("/srv/quiver/prometheus.token").read_text().strip()
    found["scrapes"] = [status for name in HOSTS for status in scrape_both(f"https://{name}:8002/metrics", token)]
    traffic = "seq 100 | quiver produce logs && quiver consume logs --from earliest | wc -l"
    found["produce"] = services[1].run("sh", "-c", traffic)
    admin = Path("/srv/quiver/admin.token").read_text().strip()
    found["download"] = scrape("https://quiver-1:8002/topics/logs/records?format=parquet", admin)
    wait_healthy(services[2], nodes[2], "/readyz?in_sync_within_ms=600000")  # the topic is new
    nodes[0].send_signal(signal.SIGTERM)
    nodes[0].communicate(timeout=LIMIT_S)
    found["stopped"] = nodes[0].returncode
    found["unhealthy"] = services[0].run("python", str(LIBRARY / "healthcheck.py"))[0]
    found["tini"] = services[1].command()[0].endswith("tini")
    for node in nodes[1:]:
        node.terminate()
    for node in nodes[1:]:
        node.communicate(timeout=LIMIT_S)
    found |= run_pod(certificates)
    return found


def run_pod(maker: Service) -> dict[str, Any]:
    """Run a node as the pod of the chart does: its id follows from its name, and its certificate is in a secret."""
    maker.run("quiver", "security", "init", "--directory", "/srv/quiver/pods", f"1@{POD}", "2@quiver-1.example")
    secret = Path("/etc/quiver")
    for name in ("ca.pem", "admin.hash"):
        shutil.copy(f"/srv/quiver/pods/{name}", secret / name)
    for number in (1, 2):
        for kind in ("pem", "key"):
            shutil.copy(f"/srv/quiver/pods/node-{number}/node.{kind}", secret / f"node-{number}.{kind}")
    for path in secret.iterdir():  # as Kubernetes gives the files of secrets to the group of a pod
        path.chmod(0o440)
        os.chown(path, 0, int(image_user().split(":")[1]))
    mount("-o", "remount,ro", "/etc/quiver")
    pod = Service({"services": {"quiver-0": {"volumes": []}}}, "quiver-0")
    pod.environment |= {
        "QUIVER_NODE__WIRE": "127.0.1.9:9002",
        "QUIVER_NODE__HTTP": "127.0.1.9:8002",
        "QUIVER_NODE__DATA": "/tmp/pod/data",
        "QUIVER_NODE__ADVERTISE": POD,
        "QUIVER_NODE__JOIN": f"1@{POD}:9002",
    }
    node = pod.start()
    wait_healthy(pod, node)
    wait_healthy(pod, node, "/readyz?in_sync_within_ms=1800000")
    context = ssl.create_default_context(cafile="/etc/quiver/ca.pem")
    with urllib.request.urlopen(f"https://{POD}:8002/livez", context=context) as answer:
        status = answer.status
    node.terminate()
    node.communicate(timeout=LIMIT_S)
    return {"pod": status, "pod stopped": node.returncode}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))) + "\n")
