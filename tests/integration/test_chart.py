"""The Helm chart: linted and rendered by helm, validated by kubeconform, and consistent with what a node knows.

`make deploy-tools` builds both programs and makes the schemas, where Go is installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from container_stand_in import image_environment, image_user

from quiver import __version__
from quiver.config import load_settings
from quiver.gateway.routes import PROBE_PATHS, ROUTES

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "kubernetes" / "quiver"
TOOLS = ROOT / "build" / "tools"
SEARCH = f"{TOOLS}:{os.environ['PATH']}"
HELM, KUBECONFORM = shutil.which("helm", path=SEARCH), shutil.which("kubeconform", path=SEARCH)
SCHEMAS = TOOLS / "schemas"
KUBERNETES = "1.33.0"

needs_helm = pytest.mark.skipif(HELM is None, reason="helm is missing: make deploy-tools (needs Go)")
SECURE = ("security.existingSecret=quiver-security",)
EVERYTHING = (
    *SECURE,
    "serviceMonitor.enabled=true",
    "serviceMonitor.tokenSecret.name=quiver-prometheus",
    "networkPolicy.enabled=true",
    "antiAffinity=preferred",
    "settings.log.segment_bytes_max=33554432",
    "settings.log.durability=fsync",
    "settings.tracing.is_enabled=true",
    "replicas=5",
    "persistence.storageClass=fast",
    "priorityClassName=high",
    "image.tag=abc",
)
INSECURE = ("security.insecure=true", "replicas=1", "podDisruptionBudget.enabled=false", "zoneSpread=false")
CASES = {"secure": SECURE, "everything": EVERYTHING, "insecure": INSECURE}


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False, timeout=60)


@cache
def render(values: tuple[str, ...], release: str = "quiver") -> str:
    sets = [part for value in values for part in ("--set", value)]
    options = ["--namespace", "logs", "--kube-version", KUBERNETES]
    done = run_helm("template", release, str(CHART), *options, *sets)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kinds(values: tuple[str, ...], release: str = "quiver") -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in yaml.safe_load_all(render(values, release)):
        if one:
            found.setdefault(one["kind"], []).append(one)
    return found


def pod(values: tuple[str, ...], release: str = "quiver") -> dict[str, Any]:
    (stateful_set,) = kinds(values, release)["StatefulSet"]
    found: dict[str, Any] = stateful_set["spec"]["template"]["spec"]
    return found


def environment(values: tuple[str, ...], ordinal: int = 0, release: str = "quiver") -> dict[str, str]:
    """Return the variables of a pod, as Kubernetes expands them."""
    (container,) = pod(values, release)["containers"]
    name = f"{release}-{ordinal}"
    return {one["name"]: one.get("value", "").replace("$(POD_NAME)", name) for one in container["env"]}


def test_chart_has_the_version_of_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_wrong(case: str) -> None:
    sets = [part for value in CASES[case] for part in ("--set", value)]
    done = run_helm("lint", "--strict", "--kube-version", KUBERNETES, str(CHART), *sets)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@needs_helm
@pytest.mark.skipif(
    KUBECONFORM is None or not SCHEMAS.exists(), reason="kubeconform or its schemas are missing: make deploy-tools"
)
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_would_accept_it(case: str) -> None:
    assert KUBECONFORM is not None
    location = f"{SCHEMAS}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
    command = [KUBECONFORM, "-strict", "-summary", "-output", "json", "-schema-location", location]
    done = subprocess.run(command, input=render(CASES[case]), capture_output=True, text=True, check=False, timeout=60)
    found = json.loads(done.stdout)
    assert not found["resources"], found["resources"]
    assert found["summary"]["valid"] == sum(map(len, kinds(CASES[case]).values()))
    broken = render(CASES[case]).replace("readOnlyRootFilesystem", "readOnlyRootFileSystem")
    assert subprocess.run(command, input=broken, capture_output=True, text=True, check=False, timeout=60).returncode


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_node_knows_all_its_settings(case: str) -> None:
    own = {name: value for name, value in environment(CASES[case]).items() if name.startswith("QUIVER_")}
    settings = load_settings(environment=image_environment() | own)
    assert settings.node.data == "/var/lib/quiver/data"
    if case == "everything":
        assert settings.log.segment_bytes_max == 33554432
        assert settings.tracing.is_enabled is True
    assert (settings.security.mode == "insecure") is (case == "insecure")


@needs_helm
@pytest.mark.parametrize("release", ["quiver", "prod"])
def test_nodes_find_each_other_by_their_names(release: str) -> None:
    found = kinds(EVERYTHING, release)
    (stateful_set,) = found["StatefulSet"]
    name = stateful_set["metadata"]["name"]
    headless = next(one for one in found["Service"] if one["spec"].get("clusterIP") == "None")
    assert stateful_set["spec"]["serviceName"] == headless["metadata"]["name"]
    assert headless["spec"]["publishNotReadyAddresses"] is True, "a node is not ready without the others"
    assert stateful_set["spec"]["podManagementPolicy"] == "Parallel"
    domain = f"{headless['metadata']['name']}.logs.svc.cluster.local"
    joined = environment(EVERYTHING, 0, name)["QUIVER_NODE__JOIN"].split(",")
    assert joined == [f"{ordinal + 1}@{name}-{ordinal}.{domain}:9002" for ordinal in range(3)]
    variables = {one["name"]: one.get("value") for one in pod(EVERYTHING, release)["containers"][0]["env"]}
    assert variables["QUIVER_NODE__ADVERTISE"] == f"$(POD_NAME).{domain}"
    assert f"{name}.logs.svc" in str(variables["QUIVER_GATEWAY__ALLOWED_HOSTS"]).split(",")
    labels = stateful_set["spec"]["template"]["metadata"]["labels"].items()
    for service in found["Service"]:
        assert service["spec"]["selector"].items() <= labels
    assert found["PodDisruptionBudget"][0]["spec"]["selector"]["matchLabels"].items() <= labels
    client = next(one for one in found["Service"] if one["spec"].get("clusterIP") != "None")
    (monitor,) = found["ServiceMonitor"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= client["metadata"]["labels"].items()
    assert not monitor["spec"]["selector"]["matchLabels"].items() <= headless["metadata"]["labels"].items()
    assert client["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "quiver", "as the alert rules expect"


@needs_helm
def test_only_one_manager_is_named_if_there_is_one_node() -> None:
    assert len(environment(INSECURE)["QUIVER_NODE__JOIN"].split(",")) == 1


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_pod_has_no_rights_that_it_does_not_need(case: str) -> None:
    found = pod(CASES[case])
    (container,) = found["containers"]
    assert found["securityContext"]["runAsNonRoot"] is True
    assert f"{found['securityContext']['runAsUser']}:{found['securityContext']['runAsGroup']}" == image_user()
    assert found["automountServiceAccountToken"] is False
    assert found["enableServiceLinks"] is False, "its variables would be taken for settings"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert mounts.keys() >= {"/var/lib/quiver", "/tmp"}
    if case != "insecure":
        assert mounts["/etc/quiver"]["readOnly"] is True
        (secret,) = [one["secret"] for one in found["volumes"] if "secret" in one]
        assert (secret["secretName"], secret["defaultMode"]) == ("quiver-security", 0o440)


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_probes_ask_what_nodes_answer(case: str) -> None:
    (container,) = pod(CASES[case])["containers"]
    paths = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    scheme = "HTTP" if case == "insecure" else "HTTPS"
    for get in paths.values():
        assert get["path"].partition("?")[0] in PROBE_PATHS
        assert (get["port"], get["scheme"]) == ("http", scheme)
    name, _, value = paths["readinessProbe"]["path"].partition("?")[2].partition("=")
    (route,) = [route for route in ROUTES if route.path == "/readyz"]
    assert route.parameters is not None
    assert name in route.parameters.__struct_fields__
    assert int(value) == 1_800_000
    assert pod(CASES[case])["terminationGracePeriodSeconds"] >= 30


@needs_helm
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((), "set security.existingSecret"),
        ((*SECURE, "serviceMonitor.enabled=true"), "set serviceMonitor.tokenSecret.name"),
        ((*SECURE, "managers=2"), "managers"),
        ((*SECURE, "antiAffinity=no"), "antiAffinity"),
    ],
)
def test_bad_values_are_refused_with_what_to_do(values: tuple[str, ...], expected: str) -> None:
    sets = [part for value in values for part in ("--set", value)]
    done = run_helm("template", "quiver", str(CHART), "--kube-version", KUBERNETES, *sets)
    assert done.returncode != 0
    assert re.search(re.escape(expected), done.stderr)
