"""Certificates of daemons: those that peers would refuse, those of other tools, and the authority that signs them."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import urllib.request
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from nosync.cli import main
from nosync.lsm.errors import ReplicationError
from nosync.replication.transport import certs
from nosync.replication.transport.certs import make_certificates
from nosync.replication.transport.channel import Certificates
from nosync.replication.transport.client import DaemonClient
from nosync.testing.daemon_cluster import eventually, free_ports, running


def test_certificates_that_peers_would_refuse_start_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    today = datetime.datetime.now(datetime.UTC)
    for name, at in (("good", 0), ("old", -1000), ("early", 10)):
        make_certificates(tmp_path / name, ["n1", "n2"], now=today + datetime.timedelta(days=at))
    make_certificates(tmp_path / "other", ["n1"])
    make_certificates(tmp_path / "outlived", [], now=today - datetime.timedelta(days=1000))
    with pytest.MonkeyPatch.context() as patch:  # as other tools sign
        patch.setattr(certs, "_end", lambda at, issuer: at + datetime.timedelta(days=certs.DAYS))
        make_certificates(tmp_path / "outlived", ["n1"], now=today - datetime.timedelta(days=200))
    for name, source, node in (("strange", "other", "n1"), ("renamed", "good", "n2")):
        shutil.copytree(tmp_path / "good", tmp_path / name)
        for end in ("pem", "key"):
            shutil.copy(tmp_path / source / f"{node}.{end}", tmp_path / name / f"n1.{end}")
    common = ["daemon", "--node", "n1", "--data", str(tmp_path / "d"), "--replicas", "1"]
    main([*common, "--tls", str(tmp_path / "good"), "--check"])
    capsys.readouterr()
    for name, message in (
        ("old", "certificate has expired"),
        ("early", "certificate is not yet valid"),
        ("outlived", "certificate has expired"),
        ("renamed", "n1.pem is of n2, and both its common name"),
        ("strange", "unable to get local issuer certificate"),
    ):
        for more in (["--check"], []):
            with pytest.raises(SystemExit):
                main([*common, "--tls", str(tmp_path / name), *more])
            assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "d").exists()


def test_certificates_of_other_tools(tmp_path: Path) -> None:
    """What gRPC would take is taken, with authorities between; and what it would not is refused."""
    usages = x509.oid.ExtendedKeyUsageOID
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("root", "between", "n1")}

    def made(name: str, by: str, *extensions: x509.ExtensionType) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        subject, issuer = (x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, n)]) for n in (name, by))
        builder = (
            x509.CertificateBuilder(issuer, subject, keys[name].public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(keys[by], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    (tmp_path / "n1.key").write_bytes(
        keys["n1"].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    is_authority = x509.BasicConstraints(ca=True, path_length=None)
    root, between = made("root", "root", is_authority), made("between", "root", is_authority)
    plain = made("n1", "between")
    names, both = x509.SubjectAlternativeName, x509.ExtendedKeyUsage([usages.SERVER_AUTH, usages.CLIENT_AUTH])
    good = made("n1", "between", names([x509.DNSName("host1"), x509.DNSName("n1")]), both)
    elsewhere = made("n1", "between", names([x509.DNSName("host1")]))
    one_sided = made("n1", "between", x509.ExtendedKeyUsage([usages.SERVER_AUTH]))
    for ca, certificate, message in (
        (root, plain + between, None),
        (b"the authority\n" + root, good + root + between, None),
        (between, good + between, None),
        (made("n1", "n1") + between, good, None),
        (root, plain, "unable to get local issuer certificate"),
        (root, elsewhere + between, "is of n1, host1, and both"),
        (root, one_sided + between, "certificate purpose"),
        (b"no certificate", plain, "holds no certificate of an authority"),
        (root, b"no certificate", "are not a certificate and its key"),
    ):
        (tmp_path / "ca.pem").write_bytes(ca)
        (tmp_path / "n1.pem").write_bytes(certificate)
        with pytest.raises(ReplicationError, match=message) if message else contextlib.nullcontext():
            Certificates.of_directory(tmp_path, "n1").check_as_peers_do("n1")


def test_no_node_is_called_as_the_authority_is(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["n1"])
    authority = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(ReplicationError, match="no node can be called 'ca'"):
        make_certificates(tmp_path, ["n2", "ca"])
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert not (tmp_path / "n2.pem").exists()


def test_files_of_a_daemon_that_are_damaged_or_say_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=1) as daemons:
        data = daemons.data("n1")
        daemons.stop("n1")
        (data / "place.json").write_text("")
        (data / "members.json").write_text('{"n1": "127.0.0.1:1", "n3": "127.0.0.1:2"}')
        main(["daemon", "--node", "n1", "--data", str(data), "--peer", "n2=127.0.0.1:3", "--replicas", "1", "--check"])
        told = capsys.readouterr()
        assert "as nosync peers left them: n3=127.0.0.1:2" in " ".join(told.err.split())
        assert "127.0.0.1:3" not in told.out
        daemons.start("n1")
        assert [peer.node for peer in daemons.status("n1").peers] == ["n3"]
        assert json.loads((data / "place.json").read_text())


def test_half_an_authority_is_not_replaced(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["n1"])
    key = (tmp_path / "ca.key").read_bytes()
    for name in ("ca.key", "ca.pem"):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        with pytest.raises(ReplicationError, match=f"{name} is not there"):
            make_certificates(tmp_path, ["n2"])
        (tmp_path / name).write_bytes(b"junk")
        with pytest.raises(ReplicationError, match="not PEM files of an authority"):
            make_certificates(tmp_path, ["n2"])
        (tmp_path / name).write_bytes(kept)
    make_certificates(tmp_path, ["n2"])
    assert (tmp_path / "ca.key").read_bytes() == key


def test_an_authority_is_replaced_while_daemons_run(tmp_path: Path) -> None:
    """With both in ca.pem, nodes that have certificates of either understand each other."""
    for directory in ("old", "new"):
        make_certificates(tmp_path / directory, ["n1", "n2"])
    both = b"".join((tmp_path / directory / "ca.pem").read_bytes() for directory in ("old", "new"))
    for directory in ("old", "new"):
        (tmp_path / directory / "ca.pem").write_bytes(both)
    with running(tmp_path / "nodes", ("n1",), replicas=1, extra=(f"--tls={tmp_path / 'new'}",)) as daemons:
        for directory in ("old", "new"):
            certificates = Certificates.of_directory(tmp_path / directory, "n2")
            address = f"127.0.0.1:{daemons.ports['n1']}"
            with contextlib.closing(DaemonClient(address, certificates, "n1")) as client:
                assert client.status().node == "n1"


@pytest.mark.parametrize(("days", "is_soon"), [(31, False), (20, True)])
def test_a_certificate_that_runs_out_soon_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], days: int, is_soon: bool
) -> None:
    today = datetime.datetime.now(datetime.UTC)
    end = today + datetime.timedelta(days=days, hours=1)
    make_certificates(tmp_path / "tls", ["n1"], now=end - datetime.timedelta(days=certs.DAYS))
    (metrics,) = free_ports(1)
    extra = (f"--tls={tmp_path / 'tls'}", f"--metrics=127.0.0.1:{metrics}")
    with running(tmp_path / "nodes", ("n1",), replicas=1, extra=extra) as daemons:
        main(["status", str(daemons.data("n1"))])
        shown = " ".join(capsys.readouterr().err.split())
        log = tmp_path / "nodes" / "n1.log"
        eventually("it serves", lambda: "node n1 serves" in log.read_text())  # metrics come after its address is told
        text = urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=5).read().decode()
        told = log.read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("nosync_certificate_end_seconds "))
    assert abs(float(line.split()[1]) - end.timestamp()) < 120
    assert (f"n1.pem runs out in {days} days" in shown) == is_soon
    assert ("nosync_problems 1.0" in text) == is_soon
    assert ("and restart the daemon with it" in told) == is_soon


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("n1.pem", "garbage", "are not a certificate and its key"), ("n1.key", "n2.key", "are not a certificate and its key"),
        ("ca.pem", "garbage", "holds no certificate of an authority"),
    ],
)  # fmt: skip
def test_a_certificate_that_is_none_is_not_called_an_address_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str, message: str
) -> None:
    tls = tmp_path / "tls"
    main(["certs", str(tls), "n1", "n2"])
    (tls / file).chmod(0o600)
    (tls / file).write_text((tls / content).read_text() if content.endswith(".key") else content)
    command = [
        "daemon",
        "--node",
        "n1",
        "--data",
        str(tmp_path / "n1"),
        "--listen",
        "127.0.0.1:0",
        "--replicas",
        "1",
        "--tls",
        str(tls),
    ]
    for more in (["--check"], []):
        with pytest.raises(SystemExit):
            main([*command, *more])
        assert message in " ".join(capsys.readouterr().err.split())
