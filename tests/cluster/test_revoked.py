"""Certificates that were revoked: daemons refuse them without a restart, callers and peers, dialled or dialling."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from pathlib import Path

import pytest

from nosync.cli import main
from nosync.lsm.errors import ReplicationError
from nosync.replication.transport.certs import make_certificates, revoke
from nosync.replication.transport.channel import Certificates
from nosync.replication.transport.client import DaemonClient
from nosync.replication.transport.revocation import REVOKED, Revocations, read_revoked, serial_of
from nosync.testing.daemon_cluster import eventually, running
from tests.helpers.daemons import publish


def test_what_a_command_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tls = tmp_path / "tls"
    main(["certs", str(tls), "n1", "n2", "n3"])
    serials = {name: serial_of((tls / f"{name}.pem").read_bytes()) for name in ("n1", "n2", "n3")}
    main(["certs", "revoke", str(tls), "n2"])
    (tls / REVOKED).write_text((tls / REVOKED).read_text() + "# a note of somebody's")
    main(["certs", "revoke", str(tls), str(tls / "n3.pem"), f"{serials['n1']:x}", "n2"])
    assert read_revoked(tls / REVOKED) == frozenset(serials.values())
    assert "# a note of somebody's" in (tls / REVOKED).read_text().splitlines()
    assert f"revoked {serials['n2']:x} (n2)" in capsys.readouterr().out
    main(["certs", "revoke", str(tls), "n2"])
    assert "has them already" in capsys.readouterr().out
    main(["certs", str(tls), "n2"])
    assert serial_of((tls / "n2.pem").read_bytes()) not in read_revoked(tls / REVOKED)


@pytest.mark.parametrize(
    ("what", "message"),
    [("n9", "n9.pem is not there, and 'n9' is no serial number"), ("abc", "no serial number"), ("ca", "is an authority's"),
     ("z" * 40, "expected hexadecimal digits"), ("n1.key", "is not the PEM file of a certificate")],
)  # fmt: skip
def test_what_cannot_be_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, message: str) -> None:
    make_certificates(tmp_path, ["n1"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReplicationError, match=message):
        revoke(tmp_path, [what])
    assert not (tmp_path / REVOKED).exists()


@pytest.mark.parametrize("text", ["nothing hexadecimal", "12 34", "²", "-1", "\x00"])
def test_a_damaged_list_is_refused_at_the_start_and_changes_nothing_later(tmp_path: Path, text: str) -> None:
    make_certificates(tmp_path, ["n1"])
    revoke(tmp_path, ["n1"])
    revocations = Revocations(tmp_path)
    (tmp_path / REVOKED).write_text(f"ab\n{text}\n")
    revocations.look()
    assert len(revocations.serials) == 1
    with pytest.raises(ReplicationError, match=rf"{REVOKED}, line 2"):
        Certificates.of_directory(tmp_path, "n1")


def test_a_list_that_is_gone_revokes_what_it_did_and_an_empty_one_nothing(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["n1"])
    revoke(tmp_path, ["n1"])
    revocations = Revocations(tmp_path)
    (tmp_path / REVOKED).unlink()
    revocations.look()
    assert len(revocations.serials) == 1
    (tmp_path / REVOKED).touch()
    revocations.look()
    assert not revocations.serials


def test_a_daemon_does_not_start_with_a_certificate_that_everybody_refuses(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["n1"])
    revoke(tmp_path, ["n1"])
    with pytest.raises(ReplicationError, match=r"n1\.pem, was revoked"):
        Certificates.of_directory(tmp_path, "n1").check_as_peers_do("n1")


def answers(address: str, tls: Path, identity: str) -> bool:
    with contextlib.closing(DaemonClient(address, Certificates.of_directory(tls, identity), "n1")) as client:
        try:
            return bool(client.status().node)
        except ReplicationError as error:
            if "was revoked" in str(error):
                return False
            raise


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_daemons_refuse_the_revoked_without_a_restart(tmp_path: Path, node: str) -> None:
    """n1 dials n2: so one of the two is refused by who dials, and the other by who is dialled. A thief has all pairs."""
    tls = tmp_path / "tls"
    make_certificates(tls, ["n1", "n2", "analyst", "other"])
    with running(tmp_path / "nodes", ("n1", "n2"), replicas=2, extra=("--tls", str(tls))) as daemons:
        with daemons.open("n1") as store:
            publish(store, 0)
        eventually("safe", lambda: daemons.safe_point("n1") == 0)
        address = f"127.0.0.1:{daemons.ports['n1']}"
        thief = tmp_path / "thief"
        thief.mkdir()
        for path in tls.iterdir():
            if path.name != "ca.key":
                (thief / path.name).write_bytes(path.read_bytes())
        assert answers(address, thief, "analyst")
        main(["certs", "revoke", str(tls), "analyst"])
        eventually("the reader is refused", lambda: not answers(address, thief, "analyst"))
        assert answers(address, tls, "other")
        with daemons.open("n1") as store:
            publish(store, 1)
        eventually("peers are linked as before", lambda: daemons.safe_point("n1") == 1)
        other = "n2" if node == "n1" else "n1"
        before = read_revoked(tls / REVOKED)
        main(["certs", "revoke", str(tls), node])
        (serial,) = read_revoked(tls / REVOKED) - before
        eventually("the peer is refused", lambda: f"was revoked (serial {serial:x})" in daemons.log(other))
        with daemons.open(other) as store:
            publish(store, 2)
            assert store.safe_point() == 1, "nothing goes over any more"


def test_a_link_of_the_revoked_is_ended_also_while_another_node_is_dialled(tmp_path: Path) -> None:
    """Who dials reads the list as well, and twice a second while a peer is away."""
    tls, of_thief = tmp_path / "tls", tmp_path / "thief"
    make_certificates(tls, ["n1", "n2", "n3"])
    shutil.copytree(tls, of_thief)  # it does not get the list
    with running(tmp_path / "nodes", ("n1", "n2", "n3"), replicas=2, start=()) as daemons:
        daemons.start("n1", "--tls", str(tls))
        daemons.start("n2", "--tls", str(of_thief))
        for number in range(1, 4):
            (tls / REVOKED).write_text("")
            eventually("it has seen that", lambda: daemons.log("n1").count("names 0 certificates") == number)  # noqa: B023
            eventually("they are linked", lambda: daemons.peer("n1", "n2").state == "up")
            revoke(tls, ["n2"])
            eventually("it is ended", lambda: daemons.peer("n1", "n2").state in ("away", "refused"))


def test_a_daemon_that_shows_no_certificate_is_not_dialled(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["n1", "n2"])
    revoke(tmp_path, ["n2"])
    certificates = Certificates.of_directory(tmp_path, "n1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def hang_up() -> None:
            server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ReplicationError, match=r"did not show its certificate, and 1 are revoked"):
            certificates.check_server(address)
        thread.join()
    certificates.check_server(address)  # nobody listens: the call says so
