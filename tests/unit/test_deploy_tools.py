"""The script that fetches what checks deploy/, as `make deploy-tools` calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci" / "deploy_tools.py"
GO = """#!/bin/sh
fail() { echo "$1" >&2; exit 1; }
case "$1 $2" in
  "mod download") echo "{\\"Dir\\": \\"$PWD\\"}"; exit ;;
  "build "*) while [ "$1" != -o ]; do shift; done; program=$2 ;;
  *) case "$2" in *prometheus*) fail "go.mod must not contain directives such as replace" ;; esac
     name=${2##*/}; program=$GOBIN/${name%@*} ;;
esac
case "$program" in /*) : > "$program" ;; *) fail "cannot install, GOBIN must be an absolute path" ;; esac
"""
"""A stand-in for Go, as strict as Go is about the directory of programs and about what can be installed."""


def test_programs_are_built_into_a_directory_that_is_given_relative(tmp_path: Path) -> None:
    tools, programs = tmp_path / "build" / "tools", tmp_path / "programs"
    for directory in (tools / "schemas", programs):
        directory.mkdir(parents=True)
    (tools / "compose-spec.json").write_text("{}")
    (programs / "go").write_text(GO)
    (programs / "go").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = [sys.executable, str(SCRIPT), "build/tools"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tools.iterdir()} >= {"helm", "kubeconform", "promtool"}
