"""A small fact whose bits were flipped on one node: the node asks its peers for it, and does not take it for another one."""

from __future__ import annotations

from pathlib import Path

from nosync.testing.daemon_cluster import eventually, running
from tests.helpers.daemons import publish


def test_a_pin_whose_bits_were_flipped_is_fetched_again(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        for t in range(3):
            publish(store, t)
        store.pin("quarter", 1)
        pins, times = (daemons.data("n2") / name for name in ("pins", "times/main"))
        eventually("n2 has the pin", lambda: [*pins.glob("quarter-*")])
        eventually("n2 has the times", lambda: [*times.glob("*.json")])
        daemons.stop("n2")
        victims = [next(pins.glob("quarter-*")), next(times.glob("*.json"))]
        whole = {path: path.read_bytes() for path in victims}
        for path, text in whole.items():
            path.write_bytes(text[: len(text) // 2] + bytes([text[len(text) // 2] ^ 4]) + text[len(text) // 2 + 1 :])
        daemons.start("n2")
        for path, text in whole.items():
            eventually(f"{path.name} is whole again", lambda p=path, x=text: p.exists() and p.read_bytes() == x)  # type: ignore[misc]
        assert len([*(daemons.data("n2") / "quarantine").iterdir()]) == 2
        for node in daemons.nodes:
            assert not daemons.status(node).problems
        assert store.pins() == {"quarter": 1}
