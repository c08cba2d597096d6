"""Fetch what checks deploy/: helm, kubeconform, promtool, and the schemas of Kubernetes and of compose files.

    python .ci/deploy_tools.py [build/tools]        # or: make deploy-tools

Everything comes through Go's module proxy, with the versions below, whose checksums Go verifies: the programs are
built, and the schemas are files of the modules. Needs Go 1.25 or newer, and nothing else; what is there already is not
fetched again. The tests find the programs on the PATH as well.

`go install` refuses modules that replace or exclude others, as that of Prometheus does. So promtool is built inside its
module, and without the service discoveries, which no rule needs. It takes about two minutes of one processor.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAMS = {
    "helm": "helm.sh/helm/v3/cmd/helm@v3.18.4",
    "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform@v0.8.0",
}
KUBERNETES = "k8s.io/kubernetes@v1.33.4"
COMPOSE = "github.com/compose-spec/compose-go/v2@v2.16.2"
PROMETHEUS = "github.com/prometheus/prometheus@v0.310.0"
OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
MONITOR = "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml"

Schema = dict[str, Any]


def main(directory: Path) -> int:
    """Fetch what is missing in a directory."""
    if shutil.which("go") is None:
        print("error: Go is not installed, which fetches and builds these tools: https://go.dev/dl", file=sys.stderr)
        return 1
    directory = directory.resolve()  # Go installs into absolute paths only
    directory.mkdir(parents=True, exist_ok=True)
    for name, package in PROGRAMS.items():
        if not (directory / name).exists():
            print(f"building {package}", flush=True)
            subprocess.run(["go", "install", package], env={**os.environ, "GOBIN": str(directory)}, check=True)
    if not (directory / "promtool").exists():
        build_promtool(directory / "promtool")
    if not (directory / "compose-spec.json").exists():
        shutil.copyfile(fetch(COMPOSE) / "schema" / "compose-spec.json", directory / "compose-spec.json")
    schemas = directory / "schemas"
    if not schemas.exists():
        unfinished = directory / "schemas.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        swagger = json.loads((fetch(KUBERNETES) / "api" / "openapi-spec" / "swagger.json").read_text())
        write_schemas(swagger["definitions"], unfinished)
        write_monitor_schema((fetch(OPERATOR) / MONITOR).read_text(), unfinished)
        unfinished.rename(schemas)
    print(f"{directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}")
    return 0


def build_promtool(program: Path) -> None:
    """Build promtool in the folder of its module, whose `go.mod` and `go.sum` then apply."""
    module = fetch(PROMETHEUS)
    print(f"building promtool of {PROMETHEUS}", flush=True)
    command = ["go", "build", "-tags", "remove_all_sd", "-ldflags", "-s -w", "-o", str(program), "./cmd/promtool"]
    subprocess.run(command, cwd=module, env={**os.environ, "GOWORK": "off"}, check=True)


def fetch(module: str) -> Path:
    """Return the directory of a module's files."""
    print(f"fetching {module}", flush=True)
    done = subprocess.run(["go", "mod", "download", "-json", module], stdout=subprocess.PIPE, check=True)
    return Path(json.loads(done.stdout)["Dir"])


def write_schemas(definitions: dict[str, Schema], directory: Path) -> None:
    """Write a schema for each kind of Kubernetes, under the name by which kubeconform looks for it."""
    strict = {name: close(one) for name, one in definitions.items()}
    (directory / "_definitions.json").write_text(json.dumps({"definitions": strict}))
    for name, definition in strict.items():
        for kind in definition.get("x-kubernetes-group-version-kind", ()):
            group = kind["group"].split(".")[0]
            file_name = "-".join(part for part in (kind["kind"], group, kind["version"]) if part).lower()
            reference = {"$ref": f"_definitions.json#/definitions/{name}"}
            (directory / f"{file_name}.json").write_text(json.dumps(reference))


def close(schema: Any) -> Any:
    """Return a schema that allows only what it names, with references to the file of all definitions."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "int-or-string" or schema.get("x-kubernetes-int-or-string"):
        return {"type": ["string", "integer"]}
    if schema.get("description", "").startswith("Quantity is a fixed-point representation"):
        return {"type": ["string", "number"]}
    closed = dict(schema)
    for name in ("items", "additionalProperties"):
        if name in schema:
            closed[name] = close(schema[name])
    for name in ("allOf", "anyOf", "oneOf"):
        if name in schema:
            closed[name] = [close(one) for one in schema[name]]
    if "$ref" in schema:
        closed["$ref"] = schema["$ref"].replace("#/definitions/", "_definitions.json#/definitions/")
    if "properties" in schema:
        closed["properties"] = {name: close(one) for name, one in schema["properties"].items()}
        closed.setdefault("additionalProperties", False)
    return closed


def write_monitor_schema(definition: str, directory: Path) -> None:
    """Write the schema of ServiceMonitors, which their own definition contains."""
    import yaml  # type: ignore[import-untyped]

    (crd,) = [one for one in yaml.safe_load_all(definition) if one]
    for version in crd["spec"]["versions"]:
        schema = version["schema"]["openAPIV3Schema"]
        schema["properties"]["metadata"] = {"type": "object"}
        group = crd["spec"]["group"].split(".")[0]
        path = directory / f"{crd['spec']['names']['kind']}-{group}-{version['name']}.json".lower()
        path.write_text(json.dumps(close(schema)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/tools")))
