"""Check that a release can be made: reproducible packages that install and work on every Python that is here.

    python .ci/release_check.py PYTHON...           # or: make release-check

It builds the source distribution and the wheel twice, from two copies of the sources that differ in everything that
must not matter (place, times, umask, time zone, seed of hashes), and compares the bytes. It checks them by twine,
installs the wheel into a fresh environment of each Python, runs the smoke test there, and writes the bill of materials.
`dist/` has the result. It ends with 1 and all that is wrong.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "release"
DIST = ROOT / "dist"
TOOLS = ("build==1.6.1", "twine==7.0.0", "cyclonedx-bom==7.5.0", "hatchling==1.33.0")
EPOCH = "1580601600"
"""Time of all files in the packages: any fixed one. Archives cannot have earlier ones than 1980."""


def main(pythons: list[str]) -> int:
    """Check everything; return 1 if something is wrong."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    wrong = find_wrong_versions(version)
    tools = make_environment(sys.executable, BUILD / "tools", *TOOLS)
    packages = build_twice(tools, wrong)
    run(str(tools / "twine"), "check", "--strict", *map(str, packages))
    (wheel,) = [path for path in packages if path.suffix == ".whl"]
    for number, python in enumerate(pythons):
        environment = make_environment(
            python, BUILD / f"python-{number}", "-c", str(ROOT / "constraints.txt"), str(wheel)
        )
        name = run(str(environment / "python"), "-c", "import platform; print(platform.python_version())").strip()
        print(f"== Python {name}: installed, smoke test", flush=True)
        run(str(environment / "python"), str(ROOT / ".ci" / "smoke.py"), version, is_shown=True)
        if not number:
            write_bill(tools, environment)
    if not pythons:
        wrong.append("no Python was found to install it with")
    for sentence in wrong:
        print(f"error: {sentence}", file=sys.stderr)
    if f"\n## [{version}] - unreleased\n" in (ROOT / "CHANGELOG.md").read_text():
        print(f"note: CHANGELOG.md has no date for {version} yet; set it in the commit that is tagged")
    if not wrong:
        print(f"{version}: reproducible, and works on {len(pythons)} versions of Python; see {DIST}")
    return 1 if wrong else 0


def find_wrong_versions(version: str) -> list[str]:
    """Return a sentence for each place that has another version than pyproject.toml."""
    wrong = []
    changes = (ROOT / "CHANGELOG.md").read_text()
    heading = re.search(rf"^## \[{re.escape(version)}\](.*)$", changes, flags=re.MULTILINE)
    if not heading:
        wrong.append(f"CHANGELOG.md has no section for {version}: rename [Unreleased], or raise the version")
    elif not re.fullmatch(r" - (\d{4}-\d\d-\d\d|unreleased)", heading[1]):
        wrong.append(f"CHANGELOG.md: {heading[0]!r} must end with ' - YYYY-MM-DD', or with ' - unreleased' until then")
    unreleased = re.search(r"\n## \[Unreleased\]\n(.*?)(?=\n## \[|\Z)", changes, flags=re.DOTALL)
    if unreleased and unreleased[1].strip():
        wrong.append(f"CHANGELOG.md has changes under [Unreleased], which a release of {version} would not name")
    places = {
        "src/quiver/__init__.py": rf'^__version__ = "{re.escape(version)}"$',
        "deploy/kubernetes/quiver/Chart.yaml": rf'^appVersion: "{re.escape(version)}"$',
    }
    for path, expected in places.items():
        if not re.search(expected, (ROOT / path).read_text(), flags=re.MULTILINE):
            wrong.append(f"{path} does not have the version {version} of pyproject.toml")
    return wrong


def build_twice(tools: Path, wrong: list[str]) -> list[Path]:
    """Build the packages from two copies of the sources into dist/; note what differs."""
    made: list[dict[str, Path]] = []
    for number, zone in enumerate(("UTC", "Asia/Kolkata")):
        source, out = BUILD / f"source-{'ab' * (number + 1)}", BUILD / f"out-{number}"
        copy_sources(source)
        command = [str(tools / "python"), "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
        differing = {"SOURCE_DATE_EPOCH": EPOCH, "TZ": zone, "PYTHONHASHSEED": str(number + 1)}
        print(f"building, {number + 1} of 2", flush=True)
        run(*command, umask=(0o022, 0o077)[number], **differing)
        made.append({path.name: path for path in sorted(out.iterdir())})
    first, second = made
    if first.keys() != second.keys():
        wrong.append(f"two builds make different files: {sorted(first)} and {sorted(second)}")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for name, path in first.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if name in second and hashlib.sha256(second[name].read_bytes()).hexdigest() != digest:
            wrong.append(f"two builds of {name} differ: compare {path} and {second[name]}")
        print(f"{digest}  {name}")
        shutil.copy(path, DIST / name)
    return [DIST / name for name in first]


def copy_sources(target: Path) -> None:
    """Copy what git tracks, so that no file that happens to lie about is packed."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            path.symlink_to(os.readlink(ROOT / name))
        else:
            shutil.copy(ROOT / name, path)  # with another time


def make_environment(python: str, directory: Path, *packages: str) -> Path:
    """Make a fresh environment with packages; return the directory of its programs."""
    run(python, "-m", "venv", str(directory))
    run(str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages)
    return directory / "bin"


def write_bill(tools: Path, environment: Path) -> None:
    """Write the bill of materials of what the wheel installs."""
    run(
        *(str(tools / "cyclonedx-py"), "environment", "--pyproject", str(ROOT / "pyproject.toml")),
        *("--mc-type", "application", "--output-reproducible", "--of", "JSON"),
        *("-o", str(DIST / "quivermq.cdx.json"), str(environment / "python")),
    )


def run(*command: str, is_shown: bool = False, umask: int = -1, **variables: str) -> str:
    """Run a command and return its output; end with what it printed if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        command,
        cwd=BUILD,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        umask=umask,
    )
    if done.returncode:
        print(f"{done.stdout}\nerror: {' '.join(command)} ended with {done.returncode}", file=sys.stderr)
        sys.exit(1)
    if is_shown:
        print(done.stdout, end="", flush=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
