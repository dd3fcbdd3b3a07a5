"""The spec of a project: `spark-pipeline.yml`, found and read as Spark does it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nosync.lsm.errors import InvalidInputError, NosyncError

_ZONE = "spark.sql.session.timeZone"
_UTC = ("UTC", "Etc/UTC", "Z", "GMT", "+00:00")


@dataclass(frozen=True)
class Spec:
    """What a spec says."""

    path: Path
    name: str
    """That of the dataflow: the spec's, in the characters of names here."""
    storage: str
    catalog: str | None
    database: str | None
    configuration: Mapping[str, str]
    globs: tuple[str, ...]

    @property
    def root(self) -> Path:
        """Returns the directory of the project, from which its files are found."""
        return self.path.parent

    @property
    def qualifiers(self) -> frozenset[tuple[str, ...]]:
        """Returns what may stand before the name of a dataset: its catalog and database, or one of them."""
        ours = tuple(part.lower() for part in (self.catalog, self.database) if part)
        return frozenset({ours, ours[1:], ours[-1:]} - {()})

    def files(self) -> list[Path]:
        """Returns the files that define datasets, each once. Raises InvalidInputError where there are none."""
        found = {
            file.resolve(): None
            for pattern in self.globs
            for file in sorted(self.root.glob(pattern))
            if file.is_file() and "__pycache__" not in file.parts
        }
        if not found:
            shown = ", ".join(self.globs) or "no libraries"
            raise InvalidInputError(f"{self.path}: it has {shown}, which no file matches: nothing is defined")
        return list(found)


def read_spec(given: Path | None) -> Spec:
    """Returns a spec: that of a file, that of a directory, or of the working directory or the nearest one above with one.

    Raises InvalidInputError where there is none, or it is none that Spark would take.
    """
    try:
        from pyspark.pipelines import cli  # noqa: PLC0415 - with its own dependencies, and only these commands need it
    except ImportError as error:
        raise NosyncError(
            f"projects of Declarative Pipelines need {error.name or 'pyspark.pipelines'}: pip install 'nosync[pipelines]'"
        ) from error
    where = given or Path.cwd()
    if not where.exists():
        raise InvalidInputError(f"{where} is not there: expected a project's directory, or its spark-pipeline.yml")
    try:
        path = where if where.is_file() else _in_directory(where) if given else cli.find_pipeline_spec(where)
        spec = cli.load_pipeline_spec(path.resolve())
    except InvalidInputError:
        raise
    except Exception as error:  # of YAML, of Spark's checks, or of what it does not check
        raise InvalidInputError(f"{where}: no spec of a pipeline: {_said(error)}") from error
    _check_zone(path, spec.configuration)
    name = re.sub(r"[^a-z0-9_]+", "-", str(spec.name).lower()).strip("-")[:64] or "pipeline"
    globs = tuple(library.include for library in spec.libraries)
    return Spec(path.resolve(), name, spec.storage, spec.catalog, spec.database, dict(spec.configuration), globs)


def _check_zone(path: Path, configuration: Mapping[str, str]) -> None:
    """Raises InvalidInputError for a time zone that would count where files are read, and not in queries."""
    for name, value in configuration.items():
        if name.lower() == _ZONE.lower() and str(value) not in _UTC:
            raise InvalidInputError(
                f"{path}: {name} is {value!r}, and datasets are computed in UTC: leave it out, and say "
                f"from_utc_timestamp(at, '{value}') where days or hours of that zone are meant"
            )


def _in_directory(directory: Path) -> Path:
    names = ("spark-pipeline.yml", "spark-pipeline.yaml")
    found = [directory / name for name in names if (directory / name).is_file()]
    if len(found) != 1:
        what = "both, and only one can be meant" if found else "neither"
        raise InvalidInputError(f"{directory}: expected {' or '.join(names)} in it; there is {what}")
    return found[0]


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
