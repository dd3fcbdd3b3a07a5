"""What operators look at and write: status, metrics, health, systemd, a configuration file."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nosync.cli import main
from nosync.replication.transport.channel import channel_to
from nosync.testing.daemon_cluster import eventually, free_ports, running
from tests.helpers.daemons import publish


def test_status_metrics_and_health(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (metrics,) = free_ports(1)
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        daemons.stop("n1")
        daemons.start("n1", "--metrics", f"127.0.0.1:{metrics}")
        publish(store, 0)
        eventually("safe", lambda: daemons.safe_point("n1") == 0)
        eventually("linked", lambda: daemons.peer("n1", "n2").state == "up")
        main(["status", str(daemons.data("n1")), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["safe_point"] == 0
        assert found["daemon"]["replicas"] == 2
        counts = found["daemon"]["stages"][0]
        assert [counts[name] for name in ("stage", "complete", "durable", "replicated")] == ["counts", 0, 0, 0]
        assert (counts["waiting_layers"], found["daemon"]["lag_s"]) == (0, 0)
        assert [(p["node"], p["state"], p["behind_files"]) for p in found["daemon"]["peers"]] == [("n2", "up", 0)]
        main(["status", str(daemons.data("n1"))])
        shown = capsys.readouterr().out
        assert "keeps 2 copies" in shown
        assert "layers waiting" in shown
        assert "n2" in shown
        text = urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=5).read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(values["nosync_safe_point_epoch"]) == 0
        assert float(values['nosync_peer_up{peer="n2"}']) == 1
        assert float(values['nosync_stage_replicated_epoch{stage="counts"}']) == 0
        assert float(values["nosync_safe_point_lag_seconds"]) == 0
        assert float(values["nosync_sent_files_total"]) >= 3
        with channel_to(f"127.0.0.1:{daemons.ports['n1']}", None) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3.0)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        daemons.kill("n1")
        main(["status", str(daemons.data("n1"))])
        assert "does not answer" in " ".join(capsys.readouterr().err.split())


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(30.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with running(tmp_path / "nodes", ("n1",), replicas=1) as daemons:
            assert told.recv(100) == b"READY=1"
            daemons.stop("n1")
            assert told.recv(100) == b"STOPPING=1"


def test_a_configuration_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    monkeypatch.chdir(tmp_path)
    file = Path("etc/node.toml")
    file.write_text('node = "n1"\ndata = "d"\nreplicas = 2\n[peers]\nn2 = "127.0.0.1:7502"\n')
    main(["daemon", "--config", str(file), "--check"])
    shown = "".join(capsys.readouterr().out.split())  # the table folds long values
    for text in ("noden1", "replicas2", "Onhowmanynodes", "dataetc/dThedata", "127.0.0.1:7500"):
        assert text in shown
    for text, message in (
        ("node = ", "is not TOML"),
        ('node = "n1"', "data is not given"),
        ('node = "n1"\ndata = "d"\nreplica = 2', "unknown field 'replica'; fields: node, data, listen"),
        ('node = "n1"\ndata = "d"\nreplicas = "2"', "replicas is '2', expected int"),
        ('node = "N 1"\ndata = "d"\nreplicas = 1', "'N 1' is not a node id"),
        (f"x = {'[' * 5000}", "is no configuration"),
        ('node = "n1"\ndata = "d"\nreplicas = 1\ntls = "x\\u0000"', "has a character of number 0"),
        ('node = "n1"\ndata = "d"\nreplicas = 1\nsockets = "x\\u0000"', "has a character of number 0"),
        ('node = "n1"\ndata = "d"\nreplicas = 1\ncheckpoints = {q = "x\\u0000"}', "has a character of number 0"),
        ('node = "n1"\ndata = "d"\nreplicas = 1\nlisten = "a..b:7500"', "listen: address 'a..b:7500': 'a..b' is not"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit):
            main(["daemon", "--config", str(file), "--check"])
        assert message in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        main(["daemon", "--config", str(tmp_path / "none.toml")])
    assert "cannot read" in capsys.readouterr().err
