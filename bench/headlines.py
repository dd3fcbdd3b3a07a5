"""The rows of the tables that open docs/benchmarks.md and README: which results they show, and in what words.

`python -m bench.report` writes them. A row names one result of one benchmark. A result that is not there is an error, so a
table never shows less than it says.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<!-- measured: python -m bench.report -->\n", "<!-- measured: end -->\n"
HEADER = (
    "| what | nosync | beside it, in the same run | ratio | goal | `python -m bench` |\n|---|--:|---|--:|---|---|\n"
)

WIDTH = 120
MEASURED_ON = (
    "Each figure is of one run on two cores of a shared machine, so ratios say more than times. "
    "[docs/benchmarks.md](docs/benchmarks.md) has the machines, all other results, and where nosync is slower."
)

STREAMING = "Structured Streaming, RocksDB + changelog"
PANDAS = "Structured Streaming, transformWithStateInPandas"
FLINK = "Flink"
IDENTITY = "identity job"
FLINK_DEFAULT = "Flink 2.3.0 SQL, RocksDB incremental, 1 s checkpoints, default"
DURABLE = "from the end of an epoch of 20,000 rows until it is durable, 10,000,000"
REPLICATED = "16 layers of 32 MiB, durable on both peers"
UNTIL = "an epoch without a loss"
WATCHED = "watched, a daemon and its peer"
LOST = "the whole host lost, its link too; {} keys"
Q3 = "NexMark Q3, 0% hot, epochs of 500,000 events"
MOVING = "moving: the same files read and rows moved into Python tasks"
JOURNALED = "100,000 keys, on an ext4 with a journal"
SLOW = "100,000 keys, a slow second node, stall p50"
LARGE, SMALL = "epochs of 500,000 rows, 2,000,000 keys", "epochs of 20,000 rows, 2,000,000 keys"
SMALL_FEW = "epochs of 20,000 rows, 100,000 keys"


@dataclass(frozen=True)
class Headline:
    """A row of a table.

    `text` is what the row says. The other fields name the result; of `workload`, `unit` and `baseline` the beginning is enough.
    """

    text: str
    benchmark: str
    workload: str
    unit: str = ""
    baseline: str = ""
    engine: str = ""
    beside: str = ""
    """The row calls the baseline so, where the baseline's own name needs the context."""

    def of(self, result: Mapping[str, Any]) -> bool:
        return (
            str(result["workload"]).startswith(self.workload)
            and str(result["unit"]).startswith(self.unit)
            and str(result["baseline"]).startswith(self.baseline)
            and self.engine in ("", result["engine"])
        )


def _nexmark(query: str, what: str, events: str = "500,000") -> list[Headline]:
    workload = f"NexMark {query}, 0% hot, epochs of {events} events"
    return [
        Headline(f"NexMark {query} ({what})", "engines_nexmark", workload, baseline=STREAMING, engine="nosync"),
        Headline("the same", "engines_nexmark", workload, baseline=FLINK, engine="nosync"),
    ]


HEADLINES = [
    Headline("publish a layer of 10,000 rows", "lsm_publish", "publish 10k rows of 2", "ms p50"),
    Headline("the same beside a state of 100,000,000 rows", "lsm_publish", "publish 10k rows, state of 100,000,000"),
    Headline("look up 100,000 keys in 10,000,000 rows", "lsm_read", "look up"),
    Headline("open a view on 1 GB", "lsm_read", "open a view"),
    Headline("merge 8 layers of 1,000,000 rows, synced", "lsm_merge", "merge 8", baseline="RocksDB"),
    Headline("space after merging; live rows", "lsm_merge", "space after merging"),
    Headline("a Spark epoch of 20,000 rows, recorded", "spark_epochs", "epoch of 20,000 rows, 2,000,000"),
    Headline("a Spark epoch of 500,000 rows, recorded", "spark_epochs", "epoch of 500,000 rows, 2,000,000"),
    Headline("an epoch, with 10,000,000 keys", "spark_epochs", "epoch of 20,000 rows, 10,000,000"),
    Headline("from its end until it is durable", "spark_epochs", DURABLE),
    Headline("an epoch's output held up, p99.9", "recovery_protocols", "100,000 keys, stall p99.9", engine="nosync"),
    Headline("the same with 1,000,000 keys", "recovery_protocols", "1,000,000 keys, stall p99.9"),
    Headline("the same with 10,000,000 keys", "recovery_protocols", "10,000,000 keys, stall p99.9"),
    Headline("the same with 100,000, on an ext4 with a journal", "recovery_protocols", f"{JOURNALED}, stall p99.9"),
    Headline("the same beside a slow second node, p50", "recovery_protocols", SLOW, engine="nosync"),
    Headline("sums, epochs of 500,000 rows", "engines_sums", LARGE, "rows/s", STREAMING),
    Headline("the same, processor time", "engines_sums", LARGE, "CPU", STREAMING),
    Headline("the same, memory", "engines_sums", LARGE, "MB of memory", STREAMING),
    Headline("sums, epochs of 20,000 rows", "engines_sums", SMALL, "rows/s", STREAMING),
    Headline("the same, 100,000 keys", "engines_sums", SMALL_FEW, "rows/s", PANDAS),
    Headline("sums, epochs of 500,000 rows", "engines_sums", "2,000,000 keys", "rows/s", FLINK_DEFAULT),
    Headline("the same", "engines_sums", LARGE, "rows/s", IDENTITY),
    Headline("sums, epochs of 20,000 rows", "engines_sums", SMALL, "rows/s", IDENTITY),
    *_nexmark("Q3", "join"),
    Headline("the same", "engines_nexmark", Q3, "events/s", "moving", "nosync", MOVING),
    *_nexmark("Q3", "join, epochs of 2,000,000 events", "2,000,000"),
    *_nexmark("Q8", "join of windows"),
    *_nexmark("Q12", "counts by window"),
    Headline("sessions of bidders (NexMark Q11)", "engines_sessions", "sessions of bidders, 0%"),
    Headline("workers of a host killed: until there is output", "takeover_hosts", "workers of one host", "s", FLINK),
    Headline("workers of two hosts of three killed", "takeover_hosts", "workers of two hosts", "s", FLINK),
    Headline("the whole host frozen", "takeover_hosts", "the whole host frozen", "s", FLINK),
    Headline("the whole host lost", "takeover_hosts", LOST.format("400,000"), "s", FLINK),
    Headline("the same with 2.7 GB of state", "takeover_hosts", LOST.format("6,000,000"), "s", baseline=UNTIL),
    Headline("layers computed again", "spark_epochs", "layers computed again"),
    Headline("32 epochs of 20,000 rows with `backfill`", "spark_epochs", "32 epochs of 20,000"),
    Headline("another number of shards, 1,000,000 keys", "rescaling_shards", "another number of shards"),
    Headline("the first epoch after it", "rescaling_shards", "and the first epoch"),
    Headline("replay 4 of 40 epochs with other code in 4 of 5 stages", "what_if", "replay 4", baseline="all 40"),
    Headline("a batch of an unchanged query, watched", "checkpoints_kept", "batch of", "ms a batch", engine=WATCHED),
    Headline("the same behind the door, async", "checkpoints_kept", "batch of", "ms a batch", engine="door, async"),
    Headline("the same behind the door, strict", "checkpoints_kept", "batch of", "ms a batch", engine="door, strict"),
    Headline("restore a checkpoint of 640 MB", "checkpoints_kept", "restore a checkpoint"),
    Headline("durable on this disk, 100 layers/s, p50", "replication_nodes", "100 layers/s of 32 KiB, durable on this"),
    Headline("durable on two peers too, p50", "replication_nodes", "100 layers/s of 32 KiB, and on"),
    Headline("large layers, durable on two peers", "replication_nodes", REPLICATED, "MB/s", "a bare gRPC"),
    Headline("a daemon at rest, of one core", "replication_nodes", "a daemon at rest", "%"),
    Headline("a task publishes 32 KiB, one peer frozen", "replication_nodes", "a task publishes 32 KiB, one peer frozen"),
]  # fmt: skip


FIGURES = [
    Headline(
        "sums by key, epochs of 500,000 rows", "engines_sums", LARGE, "rows/s", STREAMING,
        beside="Structured Streaming",
    ),
    Headline(
        "output held up by recording, p99.9", "recovery_protocols", "100,000 keys, stall p99.9", engine="nosync",
        beside="nothing on disk",
    ),
    Headline("open a view on 1 GB of state", "lsm_read", "open a view"),
    Headline(
        "a host is lost, until there is output", "takeover_hosts", LOST.format("400,000"), "s", FLINK,
        beside="Flink 2.3, its tasks run",
    ),
    Headline("layers computed again", "spark_epochs", "layers computed again"),
    Headline(
        "replay 4 of 40 epochs, other code", "what_if", "replay 4", baseline="all 40", beside="all 40 in a new store",
    ),
]  # fmt: skip
"""README shows these six, and docs/benchmarks.md opens with them."""


def table(results: Sequence[Mapping[str, Any]], lines: Sequence[Headline]) -> str:
    """Returns the rows in Markdown. `results`: whole files of bench/results.

    Raises LookupError where a row has not just one result.
    """
    known = {found["benchmark"]: found["results"] for found in results}
    return HEADER + "".join(f"| {' | '.join(_cells(line, known))} |\n" for line in lines)


def machines(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a paragraph: on which machines the rows were measured, with what, and which of them at another scale."""
    shown = [found for found in results if found["benchmark"] in {line.benchmark for line in HEADLINES}]
    found = sorted({_machine(f["machine"]) for f in shown})
    hosts = sorted({str(f["machine"]["kernel"]) for f in shown})
    said = f"Measured on {'; and on '.join(found)}"
    which = "each row on one (its section below says which)"
    if len(found) > 1:
        said += f", {which}"
    elif len(hosts) > 1:
        said += f"; on {len(hosts)} hosts of that kind, {which}"
    full = sorted({str(f["benchmark"]) for f in shown if f["scale"] == "full"})
    said += (f". With `--scale full`: {', '.join(full)}" if full else "") + "."
    return textwrap.fill(said, WIDTH) + "\n"


def _machine(said: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in said["versions"].items() if name != "nosync")
    return f"{said['cores']} cores of a shared {said['cpu']}, {said['memory_gib']} GiB, Python {said['python']}, {versions}"


def _cells(line: Headline, known: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    matching = [result for result in known.get(line.benchmark, ()) if line.of(result)]
    matching = [result for result in matching if result["workload"] == line.workload] or matching
    if len(matching) != 1:
        raise LookupError(
            f"{len(matching)} results of {line.benchmark} are those of {line.text!r}, expected one: "
            f"run `python -m bench {line.benchmark}`, or name another in bench/headlines.py"
        )
    found = matching[0]
    beside = f"{line.beside or found['baseline']}: {number(found['baseline_value'])}" if found["baseline"] else ""
    ratio = "" if found["ratio"] is None else f"{found['ratio']:.3g}"
    goal = found["goal"] + (" (**not met**)" if found["met"] is False else "")
    return [line.text, f"{number(found['value'])} {found['unit']}", beside, ratio, goal, line.benchmark]


def number(value: float) -> str:
    """Returns a number with three digits, or with all that are before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def with_table(page: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Returns README with the six figures in place of what is there between two marks."""
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise LookupError(f"the page has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}{table(results, FIGURES)}\n{textwrap.fill(MEASURED_ON, WIDTH)}\n{END}{after}"
