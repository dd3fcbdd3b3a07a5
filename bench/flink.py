"""Flink, in an environment of its own, `.venv-flink`, which is made when it is missing: it needs an older pyarrow than we do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FLINK_ENVIRONMENT = Path(".venv-flink").absolute()
FLINK_REQUIREMENT = "apache-flink>=2.3,<2.4"
_PATIENCE_S = 3600


def run_flink(program: str, about: dict[str, Any]) -> dict[str, Any]:
    """Runs a program of `bench/peers`, which reads JSON and a directory for checkpoints, and prints JSON in its last line."""
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        checkpoints, scratch = (Path(temporary).absolute() / name for name in ("checkpoints", "scratch"))
        scratch.mkdir()
        request = about | {"checkpoints": checkpoints.as_uri()}
        env = variables()
        # Its planner and web server unpack themselves there, and leave that behind.
        env["JAVA_TOOL_OPTIONS"] = f"{env.get('JAVA_TOOL_OPTIONS', '')} -Djava.io.tmpdir={scratch}".strip()
        done = subprocess.run(
            [str(flink_python()), str(Path(__file__).parent / "peers" / program)], input=json.dumps(request), env=env,
            capture_output=True, text=True, check=False, timeout=_PATIENCE_S,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"Flink failed:\n{done.stderr[-3000:]}")
    ignored = [line for line in (done.stdout + done.stderr).splitlines() if "will have no effect" in line]
    if ignored:
        raise RuntimeError(f"Flink passes over a setting, so it is not measured as is said: {ignored[0]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def flink_home() -> Path:
    (package,) = flink_python().parents[1].glob("lib/python3*/site-packages/pyflink")
    return package


def variables() -> dict[str, str]:
    """Returns the environment of Flink's processes."""
    java = os.environ.get("JAVA_HOME") or str(Path(os.path.realpath(shutil.which("java") or "java")).parents[1])
    # Without our own path, on which it would find our `proto` instead of its own.
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAVA_HOME": java}


def flink_python() -> Path:
    python = FLINK_ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print(f"installing {FLINK_REQUIREMENT} into {FLINK_ENVIRONMENT} (it needs an older pyarrow than we do)")
        venv.create(FLINK_ENVIRONMENT, with_pip=True)
        pip: Sequence[str] = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, FLINK_REQUIREMENT], capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(FLINK_ENVIRONMENT)
            raise RuntimeError(f"cannot install {FLINK_REQUIREMENT} with {sys.executable}: {done.stderr[-2000:]}")
    return python
