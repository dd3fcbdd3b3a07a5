"""A driver without Java is told what to install; who has chosen a garbage collector keeps it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import nosync
from nosync.cli import main
from nosync.spark import java as of_java
from nosync.spark.java import check_java, collector_settings, launch_settings, socket_settings


def _fake_java(directory: Path, version: str) -> None:
    (directory / "bin").mkdir()
    java = directory / "bin" / "java"
    java.write_text(f"#!{sys.executable}\nimport sys\nsys.stderr.write('openjdk version \"{version}\" 2020-01-01')\n")
    java.chmod(0o755)


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(nosync.NosyncError, match="no `java` on PATH.*apt-get install openjdk-17"):
        check_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(nosync.NosyncError, match="has no bin/java"):
        check_java()


@pytest.mark.parametrize(
    ("version", "fine"), [("1.8.0_292", False), ("11.0.2", False), ("17.0.15", True), ("21", True)]
)
def test_versions_of_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, fine: bool) -> None:
    _fake_java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if fine:
        check_java()
    else:
        with pytest.raises(nosync.NosyncError, match="17\\+ runtime"):
            check_java()


def test_what_java_says_of_its_options_is_not_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_java(tmp_path, "17.0.1")
    java = tmp_path / "bin" / "java"
    java.write_text(java.read_text().replace("'openjdk", '\'NOTE: Picked up JDK_JAVA_OPTIONS: -Da="b c"\\nopenjdk'))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    check_java()


def test_a_collector_that_somebody_chose_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two of them, and the JVM would not start."""
    for name in ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    ours = {"spark.driver.defaultJavaOptions": "-XX:+UseParallelGC"}
    assert collector_settings() == ours
    defaults = tmp_path / "spark-defaults.conf"
    defaults.write_text("spark.driver.extraJavaOptions -XX:+UseStringDeduplication -Dwhat=GC\n")
    assert collector_settings() == ours
    defaults.write_text("spark.driver.extraJavaOptions -XX:+UseZGC\n")
    assert collector_settings() == {}
    monkeypatch.delenv("SPARK_CONF_DIR")
    monkeypatch.setenv(
        "PYSPARK_SUBMIT_ARGS", '--conf "spark.driver.extraJavaOptions=-Xss4m -XX:+UseG1GC" pyspark-shell'
    )
    assert collector_settings() == {}


def test_sockets_that_somebody_chose_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "spark.python.unix.domain.socket.enabled"
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert socket_settings() == {name: "true", "spark.python.daemon.module": "nosync.spark.worker_daemon"}
    (tmp_path / "spark-defaults.conf").write_text(f"{name} false\n")
    assert socket_settings() == {}
    monkeypatch.delenv("SPARK_CONF_DIR")
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"--conf {name}=false pyspark-shell")
    assert socket_settings() == {}


def test_what_a_builder_was_told_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(of_java, "numpy_environment", lambda: {"NPY_DISABLE_CPU_FEATURES": "A,B"})
    sockets = {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.daemon.module": "nosync.spark.worker_daemon",
    }
    collector = {"spark.driver.defaultJavaOptions": "-XX:+UseParallelGC"}
    wide = {"spark.executorEnv.NPY_DISABLE_CPU_FEATURES": "A,B"}
    assert launch_settings({"spark.app.name": "mine"}) == wide | collector | sockets
    assert launch_settings({"spark.driver.extraJavaOptions": "-XX:+UseG1GC"}) == wide | sockets
    assert launch_settings({"spark.driver.defaultJavaOptions": "-Xss4m"}) == wide | sockets
    assert launch_settings({"spark.python.daemon.module": "mine"}) == wide | collector
    assert launch_settings(dict.fromkeys(wide, "")) == collector | sockets


def test_what_spark_submit_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Words that a shell may take apart at spaces."""
    monkeypatch.setattr("nosync.cli.jobs.launch_settings", lambda options: {"spark.a": "-XX:+Use", "spark.b": "A,B"})
    main(["spark-conf"])
    assert capsys.readouterr().out.split() == ["--conf", "spark.a=-XX:+Use", "--conf", "spark.b=A,B"]
    main(["spark-conf", "--json"])
    assert json.loads(capsys.readouterr().out) == {"spark.a": "-XX:+Use", "spark.b": "A,B"}
