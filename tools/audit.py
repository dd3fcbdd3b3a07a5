"""Says which installed packages have known holes: by tools/refused-versions.toml, and by pip-audit where it reaches its data.

    python tools/audit.py [--pip-audit PATH/TO/pip-audit]

Ends with 1 where a package is refused or vulnerable. That pip-audit could not look at something is said, and is no success.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

LIST = Path(__file__).with_name("refused-versions.toml")
OWN = "nosync"
TIMEOUT_S = 600


def refused() -> list[tuple[str, SpecifierSet, str]]:
    """The list: name, versions, and why."""
    with LIST.open("rb") as file:
        found = tomllib.load(file)["refused"]
    return [(canonicalize_name(one["name"]), SpecifierSet(one["versions"]), one["why"]) for one in found]


def installed() -> dict[str, str]:
    """Returns the version of every distribution of this environment, by name."""
    return {canonicalize_name(one.metadata["Name"]): one.version for one in metadata.distributions()}


def refused_among(found: Mapping[str, str]) -> list[str]:
    """A line for each that the list refuses, release candidates among them."""
    return [
        f"{name} {found[name]} is refused ({versions}): {why}"
        for name, versions, why in refused()
        if name in found and versions.contains(found[name], prereleases=True)
    ]


def admitted(requirements: Sequence[str]) -> list[str]:
    """A line for each requirement whose oldest version is refused."""
    found = {}
    for text in requirements:
        requirement = Requirement(text)
        oldest = [one.version for one in requirement.specifier if one.operator in (">=", "==", "~=")]
        found[canonicalize_name(requirement.name)] = oldest[0] if oldest else "0"
    return refused_among(found)


def by_pip_audit(program: str) -> tuple[list[str], str]:
    """Returns what pip-audit finds, a line each, and what it says of itself: how much it has looked at."""
    site = sysconfig.get_paths()["purelib"]
    command = [program, "--path", site, "--format", "json", "--progress-spinner", "off"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        packages = [one for one in json.loads(ran.stdout)["dependencies"] if canonicalize_name(one["name"]) != OWN]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        return [], f"pip-audit gave no answer ({type(error).__name__}): only the list was asked"
    found = [
        f"{one['name']} {one['version']}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no version'}"
        for one in packages
        for hole in one.get("vulns", ())
    ]
    skipped = sum("skip_reason" in one for one in packages)
    if skipped:
        return (
            found,
            f"pip-audit has no data of {skipped} of {len(packages)} packages: of these only the list was asked",
        )
    return found, f"pip-audit looked at {len(packages)} packages"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was found. Returns 1 where that is anything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pip-audit", metavar="PROGRAM", help="the program to ask besides the list")
    given = parser.parse_args(arguments)
    packages = installed()
    found = refused_among(packages)
    print(f"{len(packages)} packages, {len(refused())} refused ranges of versions in {LIST.name}")
    if given.pip_audit:
        more, said = by_pip_audit(given.pip_audit)
        found += more
        print(said)
    for line in found:
        print(f"  {line}")
    print("none is known to be vulnerable" if not found else f"{len(found)} to be replaced")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
