"""Projects of Declarative Pipelines that tests write, and the rows that come to them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nosync
from nosync.lsm.store.store import Store
from nosync.pipelines.declaring import Pipeline, declare_project
from nosync.pipelines.recorded_inputs import recorded_stages
from nosync.pipelines.running import Run, RunReport
from nosync.pipelines.spec import read_spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPEC = "name: shop\nstorage: file://{root}/storage\nlibraries:\n  - glob:\n      include: transformations/**\n"
HEAD = """from pyspark import pipelines as dp
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()

"""
Row = Mapping[str, Any]


class Project:
    """A project in a directory, its store, and the rows that its streams read."""

    def __init__(self, root: Path, spark: SparkSession, **files: str) -> None:
        """`files`: those in `transformations/`, by name without ending: SQL where they begin with CREATE."""
        self.root, self.spark, self._count, self.given = root, spark, 0, 0
        (root / "data").mkdir(parents=True, exist_ok=True)
        (root / "spark-pipeline.yml").write_text(SPEC.format(root=root))
        for name, text in files.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.root / "transformations").mkdir(exist_ok=True)
        is_sql = text.lstrip().startswith(("CREATE", "--", "SET"))
        path = self.root / "transformations" / f"{name}{'.sql' if is_sql else '.py'}"
        text = text.replace("data/", f"{self.root}/data/")  # paths are those of Spark's JVM, which all tests share
        path.write_text(text if is_sql else HEAD + text)

    def give(self, stream: str, rows: Iterable[Row]) -> None:
        """Adds a file of JSON lines to the directory that a stream reads."""
        directory = self.root / "data" / stream
        directory.mkdir(parents=True, exist_ok=True)
        rows = list(rows)
        self._count, self.given = self._count + 1, self.given + len(rows)
        (directory / f"{self._count:03}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write_table(self, name: str, rows: Iterable[Row]) -> None:
        """Replaces the file of a table that the project reads in whole."""
        path = self.root / "data" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def declare(self, store: Store | None = None) -> Pipeline:
        return declare_project(read_spec(self.root), self.spark, {} if store is None else recorded_stages(store))

    def run(self, shards: int | None = 1, said: Callable[[str], object] = lambda _: None) -> RunReport:
        with nosync.open(self.root / "store") as store:
            return Run(self.declare(store), store, shards, said).run()

    def rows(self, dataset: str, as_of: int | None = None, branch: str = "main") -> Counter[tuple[Any, ...]]:
        """Returns what the store has of a dataset."""
        with nosync.open(self.root / "store", read_only=True) as store:
            table = store.read(dataset, as_of, branch=branch)
            columns = [table.column(name).to_pylist() for name in sorted(table.column_names)]
            return Counter(zip(*columns, strict=True))
