"""The end of a log is lost on one of two nodes: it is named and not read past, and comes back from the other one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.testing.daemon_cluster import Daemons, eventually, running

NODES = ("n1", "n2")


def seal(store: nosync.Store, epochs: range, mark: str) -> None:
    for t in epochs:
        store.append("c", t=t, rows=pa.table({"k": [f"{mark}{t}"]}), key=["k"])
        store.seal(t)


def keys(store: nosync.Store) -> set[str]:
    return set(store.read("c").column("k").to_pylist())


def filled(daemons: Daemons, *, rewound: bool) -> None:
    """Epochs 0 to 3 are on both nodes, which are stopped."""
    with daemons.open("n1") as store:
        seal(store, range(4), "a")
        if rewound:
            eventually("all have it", lambda: all(daemons.safe_point(node) == 3 for node in NODES))
            store.rewind(1)
            seal(store, range(2, 4), "b")
        store.sync()
        eventually("both have it", lambda: all(daemons.safe_point(node) == 3 for node in NODES))
        eventually(
            "both rewound", lambda: all((daemons.data(n) / "branches/1.json").exists() is rewound for n in NODES)
        )
    for node in NODES:
        daemons.stop(node)


@pytest.mark.few(1, "make cluster")
@pytest.mark.parametrize(
    ("lost", "problem", "error"),
    [
        ("manifests/main/3.json", "lost epochs at the end of main", nosync.LostEpochError),
        ("branches/1.json", "branches", nosync.CorruptionError),
    ],
)
def test_the_end_of_a_log_on_one_node(tmp_path: Path, lost: str, problem: str, error: type[nosync.NosyncError]) -> None:
    rewound = lost.startswith("branches")
    with running(tmp_path, NODES, replicas=2) as daemons:
        filled(daemons, rewound=rewound)
        expected = {"a0", "a1", *(f"{'b' if rewound else 'a'}{t}" for t in (2, 3))}
        (daemons.data("n1") / lost).unlink()
        daemons.start("n1")
        assert problem in daemons.status("n1").problems
        address = f"127.0.0.1:{daemons.ports['n1']}"
        with daemons.open("n1") as store, nosync.connect(address, cache=tmp_path / "cache") as connected:
            for one in (store, connected):
                with pytest.raises(error):
                    keys(one)
            daemons.start("n2")
            eventually("it comes back", (daemons.data("n1") / lost).exists)
            eventually("it is not named any more", lambda: not daemons.status("n1").problems)
            for one in (store, connected):
                eventually("it is read", lambda one=one: keys(one) == expected)
