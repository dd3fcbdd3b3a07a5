"""Runs the short suite beside this file on the oldest and on the newest Python and packages that pyproject.toml allows, and on
the releases of Spark between.

    python -m tests.compat.run [DIRECTORY]

The environments are made in DIRECTORY (`.venv-compat`), two at the same time, and made again when what belongs in them changes.
The oldest one has the lowest release of each package that the metadata allow, the newest one what pip finds, and those between
the same but for Spark. A Python that is not on this machine is told, and the newest packages are then tested on the one that
runs this.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = ("spark", "pipelines")
"""What of the optional packages the suite needs."""
SPARK = "pyspark"
AT_ONCE = 2
OF_TESTS = ("hypothesis", "pytest", "pytest-timeout")
_PYTHON = "Programming Language :: Python :: "
_SAID = "compat: "


@dataclass(frozen=True)
class Environment:
    """A Python and the packages that belong in it, as pip takes them."""

    name: str
    python: str
    packages: tuple[str, ...]


def environments(project: dict[str, Any]) -> list[Environment]:
    """The oldest and the newest that the metadata allow, and one for each release of Spark between. `project`: the table of
    that name in pyproject.toml.
    """
    declared = [Requirement(text) for text in project["dependencies"]]
    declared += [Requirement(text) for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    declared = [each for each in declared if each.name != project["name"]]  # an extra that takes another one
    of_tests = [str(r) for r in map(Requirement, project["optional-dependencies"]["dev"]) if r.name in OF_TESTS]
    known = sorted(_numbers(text.removeprefix(_PYTHON)) for text in project["classifiers"] if text.startswith(_PYTHON))
    pythons = [".".join(map(str, version)) for version in known if len(version) == 2]
    oldest = [f"{each.name}{_extras(each)}=={lowest(each)}" for each in declared]
    newest = [str(each) for each in declared if each.name != SPARK]
    extras = sorted({extra for each in declared if each.name == SPARK for extra in each.extras})
    sparks = sorted({version for each in declared if each.name == SPARK for version in between(each)})
    return [
        Environment("oldest", lowest(Requirement(f"python{project['requires-python']}")), (*oldest, *of_tests)),
        *(
            Environment(
                f"spark-{version}", pythons[-1], (*newest, f"{SPARK}[{','.join(extras)}]=={version}.*", *of_tests)
            )
            for version in sparks
        ),
        Environment("newest", pythons[-1], (*map(str, declared), *of_tests)),
    ]


def between(requirement: Requirement) -> list[str]:
    """The releases, by their first two numbers, after the lowest that a requirement allows and before the last one."""
    first = _numbers(lowest(requirement))
    end = next(_numbers(each.version) for each in requirement.specifier if each.operator == "<")
    if first[0] != end[0]:
        return []
    return [f"{first[0]}.{minor}" for minor in range(first[1] + 1, end[1] - 1)]


def lowest(requirement: Requirement) -> str:
    """The release that a requirement begins with. Raises ValueError where it begins with none."""
    for each in requirement.specifier:
        if each.operator in (">=", "=="):
            return each.version
    raise ValueError(f"{requirement} has no lowest release, expected name>=release")


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def find_python(version: str) -> str | None:
    """An interpreter of this version on the machine: the one that runs this, one on PATH, or one of pyenv's."""
    wanted = _numbers(version)
    root = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    of_pyenv = sorted(Path(root, "versions").glob(f"{version}.*/bin/python"), key=lambda path: _numbers(path.parts[-3]))
    on_path = shutil.which(f"python{version}")
    for path in (sys.executable, *([on_path] if on_path else []), *map(str, reversed(of_pyenv))):
        code = "import ensurepip, sys; print(*sys.version_info[:2])"  # Debian's without venv has no ensurepip
        ran = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if tuple(map(int, ran.stdout.split())) == wanted:
            return path
    return None


def make(environment: Environment, python: str, directory: Path) -> Path:
    """The environment's interpreter, with its packages installed. Raises CalledProcessError where pip fails."""
    home = directory / environment.name
    stamp, belongs = home / "made-of", "\n".join((python, *environment.packages))
    if not stamp.exists() or stamp.read_text() != belongs:
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([python, "-m", "venv", "--without-pip", str(home)], check=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin" / "python")]
        subprocess.run([*pip, "install", "--quiet", *environment.packages], check=True)
        stamp.write_text(belongs)
    return home / "bin" / "python"


def run_suite(environment: Environment, directory: Path) -> tuple[int, str]:
    """Pytest's exit code, and what to print."""
    python, note = find_python(environment.python), ""
    if python is None:
        note = f"{_SAID}no Python {environment.python} on this machine: {environment.name} packages on {sys.version.split()[0]}\n"
    try:
        interpreter = make(environment, python or sys.executable, directory)
    except subprocess.CalledProcessError as error:
        return 1, f"{note}{_SAID}the {environment.name} environment cannot be made: {error}\n"
    own = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME")  # those of whoever runs this
    variables = {name: value for name, value in os.environ.items() if name not in own}
    show = "import sys, pyspark, pyarrow; print(sys.version.split()[0], pyspark.__version__, pyarrow.__version__)"
    found = subprocess.run([str(interpreter), "-c", show], capture_output=True, text=True, check=True).stdout.split()
    ran = subprocess.run(
        [str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/compat/test_versions.py"],
        cwd=ROOT, env={**variables, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    of = "Python {}, pyspark {}, pyarrow {}".format(*found)
    return ran.returncode, f"{note}{_SAID}{environment.name}: {of}\n{ran.stdout}"


def main(directory: Path) -> int:
    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted = environments(tomllib.load(file)["project"])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(lambda each: run_suite(each, directory), wanted))
    for _, text in ended:
        print(re.sub(r"\n*\Z", "\n", text), flush=True)
    return max(code for code, _ in ended)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-compat").resolve()))
