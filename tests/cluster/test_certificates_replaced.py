"""All certificates are replaced while the nodes go on: the two rounds of docs/daemons.md, one daemon after the other."""

from __future__ import annotations

import shutil
from pathlib import Path

from nosync.replication.transport.certs import make_certificates
from nosync.testing.daemon_cluster import Daemons, eventually, running
from tests.helpers.daemons import publish

NODES = ("n1", "n2", "n3")


class Rounds:
    """Gives the nodes other certificates, and looks each time whether an epoch still gets to its two copies."""

    def __init__(self, daemons: Daemons, tls: Path) -> None:
        self._daemons, self._tls = daemons, tls
        self._t = 0
        for node in NODES:
            (self._tls / node).mkdir(parents=True)

    def give(self, node: str, made: Path, *, pair: bool, authorities: tuple[Path, ...]) -> None:
        """Puts files into the directory of a node, as `scp` does."""
        mine = self._tls / node
        (mine / "ca.pem").write_bytes(b"".join((of / "ca.pem").read_bytes() for of in authorities))
        for name in (f"{node}.pem", f"{node}.key") if pair else ():
            shutil.copy(made / name, mine / name)

    def start(self, node: str) -> None:
        self._daemons.start(node, "--tls", str(self._tls / node))

    def restart(self, node: str) -> None:
        """Restarts a daemon, and waits until what is recorded there then is safe, by way of the two others."""
        self._daemons.stop(node)
        self.start(node)
        self.publish(node)

    def publish(self, node: str) -> None:
        others = [other for other in NODES if other != node]
        eventually("it is linked", lambda: all(self._daemons.peer(node, other).state == "up" for other in others))
        t = self._t
        with self._daemons.open(node) as store:
            publish(store, t)
        eventually(f"epoch {t} is safe on {node}", lambda: self._daemons.safe_point(node) == t)
        eventually("the others have it", lambda: all(self._daemons.safe_point(other) == t for other in others))
        self._t += 1


def test_all_are_replaced_one_by_one(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make_certificates(old, [*NODES])
    make_certificates(new, [*NODES])
    with running(tmp_path / "nodes", NODES, replicas=2, start=()) as daemons:
        rounds = Rounds(daemons, tmp_path / "tls")
        for node in NODES:
            rounds.give(node, old, pair=True, authorities=(old,))
            rounds.start(node)
        rounds.publish("n1")
        for node in NODES:  # the first round: all learn to accept both
            rounds.give(node, new, pair=False, authorities=(old, new))
            rounds.restart(node)
        for node in NODES:  # the second: each shows its new one
            rounds.give(node, new, pair=True, authorities=(old, new))
            rounds.restart(node)
        for node in NODES:  # the end: the old authority goes
            rounds.give(node, new, pair=False, authorities=(new,))
            rounds.restart(node)
        daemons.stop("n3")
        rounds.give("n3", old, pair=True, authorities=(old, new))
        rounds.start("n3")
        eventually("an old one is refused", lambda: daemons.peer("n1", "n3").state in ("away", "refused"))
        assert daemons.peer("n1", "n2").state == "up"
