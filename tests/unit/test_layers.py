"""The shape of the source tree, as data, and a checker that holds it.

The order of the layers is the one of `docs/architecture/overview.md`. Each rule is proven able to fail by
a source that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "quiver"

LAYERS = (
    ("deploy",),
    ("model", "clock", "tasks"),
    ("backoff",),
    ("errors", "shapes"),
    ("features",),
    ("addresses",),
    ("security",),
    ("turns",),
    ("contexts",),
    ("metrics",),
    ("config",),
    ("logs",),
    ("tls_acceptor",),
    ("faults", "loop_watchdog"),
    ("record",),
    ("tracing",),
    ("raft",),
    ("storage",),
    ("groups",),
    ("wire",),
    ("routing",),
    ("replication",),
    ("partition",),
    ("metadata",),
    ("access",),
    ("client",),
    ("classic",),
    ("spark",),
    ("manager",),
    ("broker",),
    ("gateway",),
    ("dispatch",),
    ("process",),
    ("environment",),
    ("node_metrics",),
    ("node",),
    ("operations",),
    ("testing",),
    ("cli",),
    ("__main__",),
)
"""Lowest first. A module imports only from lines above its own, and from its own package."""

CLIENT = (
    "errors",
    "features",
    "model",
    "clock",
    "tasks",
    "backoff",
    "addresses",
    "security",
    "contexts",
    "metrics",
    "record",
    "tracing",
    "groups",
    "wire",
    "routing",
)
ONLY_FROM = {"routing": CLIENT, "client": CLIENT, "classic": ("contexts",), "spark": (*CLIENT, "client", "logs")}
"""Packages that may use less than all that lies above them: the SDK is to be installed without the server."""

FROM_THE_ROOT = ("errors", "record", "wire", "routing", "client")
"""What the root package shows to users, and may therefore name."""

PURE_METADATA = (
    "apply",
    "brokers",
    "clients",
    "command_types",
    "commands",
    "comparison",
    "decision",
    "group_commands",
    "groups",
    "journal",
    "recovery",
    "rows",
    "state",
    "topics",
)
PURE_MANAGER = ("describe", "describe_groups", "group_plan", "node_claims", "placement", "repairs")
PURE = (
    "record/",
    "raft/",
    "groups/",
    *(f"metadata/{name}.py" for name in PURE_METADATA),
    *(f"manager/{name}.py" for name in PURE_MANAGER),
)
"""What computes and nothing else: the same input gives the same output, in a simulation as in production."""
IMPURE_MODULES = frozenset(
    ("asyncio", "time", "random", "os", "logging", "uuid", "secrets", "threading", "socket", "subprocess", "pathlib")
)
IMPURE_LAYERS = frozenset(("logs",))

MAY_OPEN_FILES = (
    "contexts.py",
    "gateway/console/assets.py",  # files of the package itself
    "security/",
    "storage/",
    "process.py",
    "operations/",
    "cli/",
    "testing/",
    "spark/session.py",
    "spark/shipping.py",
    "spark/pipelines/",
)
FILE_CALLS = frozenset(
    ("open", "io.open", "os.open", "os.fdopen", "os.remove", "os.unlink", "os.rename", "os.replace", "os.truncate")
)
FILE_METHODS = frozenset(("read_text", "read_bytes", "write_text", "write_bytes", "unlink"))

UNSAFE_MODULES = frozenset(("pickle", "marshal", "shelve", "dill", "cloudpickle"))
UNSAFE_CALLS = frozenset(("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"))

TIMEOUT_CALLS = frozenset(("asyncio.timeout", "asyncio.timeout_at"))

NAMES_WITHOUT_A_NOUN = frozenset(("utils", "util", "helpers", "helper", "common", "base", "misc"))
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600


def check_source(path: str, source: str) -> list[str]:
    """Return a sentence for every rule that the module at `path`, relative to the package, breaks."""
    tree = ast.parse(source)
    checks = (_check_imports, _check_calls, _check_functions)
    found = [complaint for check in checks for complaint in check(path, tree)]
    if len(source.splitlines()) > MODULE_LINES_MAX:
        found.append(f"{path}: {len(source.splitlines())} lines, at most {MODULE_LINES_MAX}")
    if NAMES_WITHOUT_A_NOUN.intersection(path.removesuffix(".py").split("/")):
        found.append(f"{path}: its name says nothing about what it owns")
    return found


def _check_imports(path: str, tree: ast.Module) -> Iterator[str]:
    layer = layer_of(path)
    for line, module in _imported_modules(path, tree):
        top = module.split(".")[0]
        where = f"{path}:{line}: imports {module}"
        if top in UNSAFE_MODULES:
            yield f"{where}, which can be made to run what it reads"
        if path.startswith(PURE) and top in IMPURE_MODULES:
            yield f"{where}, but it is to be pure"
        if top != "quiver":
            continue
        target = module.removeprefix("quiver").lstrip(".").split(".")[0]
        if path.startswith(PURE) and target in IMPURE_LAYERS:
            yield f"{where}, but it is to be pure"
        if not _may_import(layer, target):
            yield f"{where}, which is not below it"


def _imported_modules(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and absolute name of every module that is imported, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            # `from quiver import record` names a module by its alias.
            names = [f"quiver.{alias.name}" for alias in node.names] if module == "quiver" else [module]
            yield from ((node.lineno, name) for name in names)


def _absolute(path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = ["quiver", *path.split("/")][: -node.level]
    return ".".join((*package, *((node.module or "").split("."))))


def layer_of(path: str) -> str:
    """Return the package, or the module beside the packages, that a path belongs to."""
    return path.split("/")[0].removesuffix(".py")


def _may_import(layer: str, target: str) -> bool:
    ranks = {name: rank for rank, names in enumerate(LAYERS) for name in names}
    if target == layer or target not in ranks:
        return True  # its own package, or a name of the root package such as __version__
    if layer in ONLY_FROM:
        return target in ONLY_FROM[layer]
    if layer == "__init__":
        return target in FROM_THE_ROOT
    return ranks[target] < ranks[layer]


def _check_calls(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        opens = name in FILE_CALLS or (isinstance(node.func, ast.Attribute) and node.func.attr in FILE_METHODS)
        if opens and not path.startswith(MAY_OPEN_FILES):
            yield f"{path}:{node.lineno}: calls {name}, but only storage opens files"
        if name in UNSAFE_CALLS:
            yield f"{path}:{node.lineno}: calls {name}"
        if name in TIMEOUT_CALLS and path != "tasks.py":
            yield f"{path}:{node.lineno}: calls {name}, which differs between Pythons: take it from quiver.tasks"


def _check_functions(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def _modules() -> list[str]:
    return sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", _modules())
def test_module_keeps_the_rules(path: str) -> None:
    assert check_source(path, (SOURCE / path).read_text()) == []


def test_every_package_has_a_place_in_the_order() -> None:
    known = {name for names in LAYERS for name in names}
    assert {layer_of(path) for path in _modules()} - known == {"__init__"}


def test_overview_shows_the_packages_in_this_order() -> None:
    overview = (SOURCE.parents[1] / "docs" / "architecture" / "overview.md").read_text()
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)`", overview, flags=re.MULTILINE)
    ranks = {name: rank for rank, names in enumerate(LAYERS) for name in names}
    assert rows == sorted(rows, key=ranks.__getitem__)
    assert {layer_of(path) for path in _modules()} - {"__init__", "__main__"} <= set(rows)


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("record/batch.py", "from quiver.storage.disk import Disk", "not below it"),
        ("record/batch.py", "import quiver.raft.state", "not below it"),
        ("record/batch.py", "from quiver import cli", "not below it"),
        ("record/batch.py", "from ..storage import disk", "not below it"),
        ("storage/log.py", "def later():\n    from quiver.testing import SimulatedDisk", "not below it"),
        ("config.py", "from quiver.logs import facts", "not below it"),
        ("client/producer.py", "from quiver.storage import Log", "not below it"),
        ("raft/core.py", "import time", "pure"),
        ("raft/core.py", "import os.path", "pure"),
        ("record/batch.py", "from random import Random", "pure"),
        ("record/batch.py", "from quiver.logs import facts", "pure"),
        ("manager/placement.py", "import asyncio", "pure"),
        ("metadata/apply.py", "import logging", "pure"),
        ("partition/replica.py", "open('x')", "only storage opens files"),
        ("partition/replica.py", "os.open('x', 0)", "only storage opens files"),
        ("gateway/http.py", "Path('x').read_text()", "only storage opens files"),
        ("storage/log.py", "import pickle", "run what it reads"),
        ("wire/frame.py", "from marshal import loads", "run what it reads"),
        ("wire/frame.py", "eval('1')", "calls eval"),
        ("cli/log.py", "yaml.load(text)", "calls yaml.load"),
        ("client/sync.py", "async with asyncio.timeout(1): pass", "differs between Pythons"),
        ("storage/utils.py", "", "says nothing"),
        ("storage/log.py", "def long():\n" + "    pass\n" * FUNCTION_LINES_MAX, "at most 70"),
        ("storage/log.py", "class A:\n    async def long(self):\n" + "        pass\n" * 70, "at most 70"),
        ("storage/log.py", "x = 1\n" * (MODULE_LINES_MAX + 1), "at most 600"),
    ],
)
def test_checker_finds_a_broken_rule(path: str, source: str, complaint: str) -> None:
    found = check_source(path, source)
    assert [sentence for sentence in found if complaint in sentence], found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("storage/log.py", "from quiver.record.batch import Batch\nfrom quiver.raft import messages\nimport asyncio"),
        ("storage/disk.py", "import os\nos.open('x', 0)"),
        ("storage/log.py", "disk.open('x')"),
        ("cli/log.py", "from quiver import __version__\nwith open('x') as file: pass"),
        ("record/batch.py", "from quiver.record.header import BatchHeader\nfrom .header import BatchHeader"),
        ("storage/log.py", "def long():\n" + "    pass\n" * (FUNCTION_LINES_MAX - 1)),
        ("storage/log.py", "x = 1\n" * MODULE_LINES_MAX),
    ],
)
def test_checker_lets_good_sources_pass(path: str, source: str) -> None:
    assert check_source(path, source) == []
