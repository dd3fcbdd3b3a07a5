"""The map in pyproject.toml, the symlinks, the disk and what gets imported must agree."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nosync

ROOT = Path(__file__).parents[2]
LINKED = ("lsm", "proto", "replication")
TOP = {
    ".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
    "SECURITY.md", "bench", "deploy", "docs", "examples", "lsm", "mkdocs.yml", "nosync", "proto", "pyproject.toml",
    "replication", "tests", "tools",
}  # fmt: skip


def _settings() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["setuptools"]


def test_the_top_level_has_nothing_that_a_page_or_a_run_left_behind() -> None:
    ran = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip("this is no checkout")
    assert {path.split("/")[0] for path in ran.stdout.splitlines()} == TOP


def test_every_package_on_disk_is_in_the_wheel() -> None:
    on_disk = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("nosync", *LINKED)
        for path in (ROOT / top).rglob("__init__.py")
        if not any((ROOT / Path(*path.relative_to(ROOT).parts[:n])).is_symlink() for n in range(1, 9))
    }
    on_disk = {name if name.split(".")[0] == "nosync" else f"nosync.{name}" for name in on_disk}
    assert set(_settings()["packages"]) == on_disk  # type: ignore[call-overload]


def test_the_map_and_the_symlinks_agree() -> None:
    package_dir = _settings()["package-dir"]
    for name in LINKED:
        assert package_dir[f"nosync.{name}"] == name  # type: ignore[index]
        link = ROOT / "nosync" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..", name)
    assert Path(nosync.__file__).parent == ROOT / "nosync"


@pytest.mark.parametrize("name", LINKED)
def test_the_top_level_name_is_not_importable(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert f"import this package as nosync.{name}" in ran.stderr


def test_a_built_wheel_has_every_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    import zipfile

    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    for top in ("nosync", *LINKED):
        prefix = "" if top == "nosync" else "nosync/"
        for path in (ROOT / top).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                assert prefix + str(path.relative_to(ROOT)) in names
