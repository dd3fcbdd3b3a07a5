"""Nodes after a damage or a loss: small facts are asked of peers again, and what waits for one that is lost is told."""

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


def test_an_epoch_that_waits_is_told_after_a_restart(tmp_path: Path) -> None:
    """It is the alert for a peer that is lost."""
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons:
        with daemons.open("n1") as store:
            publish(store, 0)
            eventually("it is safe", lambda: daemons.safe_point("n1") == 0)
            assert daemons.status("n1").lag_s == 0
            daemons.kill("n2")
            publish(store, 1)
        daemons.stop("n1")
        daemons.start("n1")
        eventually("it waits", lambda: daemons.status("n1").lag_s > 0)
        daemons.start("n2")
        eventually("it waits no more", lambda: daemons.status("n1").lag_s == 0 and daemons.safe_point("n1") == 1)
