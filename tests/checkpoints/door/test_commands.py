"""`nosync checkpoint serve` and `nosync checkpoint address`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nosync
from nosync.testing.daemon_cluster import eventually
from tests.checkpoints.door.client import Client
from tests.checkpoints.door.query_through_door import QueryThroughDoor
from tests.checkpoints.test_commands import run


def test_serving_and_asking_for_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    code, _, err = run(capsys, "checkpoint", "address", "words", "--store", data)
    assert code == 1
    assert "has had no door: start `nosync checkpoint serve" in err
    command = [sys.executable, "-m", "nosync.cli", "checkpoint", "serve", "--store", str(data)]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--strict"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        eventually("the door is open", (data / "checkpoint-live" / ".address").exists, 60.0)
        code, out, _ = run(capsys, "checkpoint", "address", "words", "--store", data)
        assert code == 0
        query = QueryThroughDoor(tmp_path / "ck", out.strip(), "changelog")
        query.run(3)
        code, _, err = run(capsys, "checkpoint", "serve", "--store", data, "--listen", "127.0.0.1:0")
        assert code == 1
        assert "has a door already" in err
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert out.strip().replace("/words", "/name") in printed
    assert nosync.checkpoint("words", data).status().safe == 2


def test_what_is_said_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["--listen", "7502"], "expected HOST:PORT"),
        (["--listen", "127.0.0.1:x"], "expected HOST:PORT"),
        (["--listen", "0.0.0.0:0"], "give a certificate"),
        (["--listen", "127.0.0.1:99999"], "expected 0"),
        (["--certificate", tmp_path / "c"], "and its key"),
    ):
        code, _, err = run(capsys, "checkpoint", "serve", "--store", tmp_path, *arguments)
        assert code != 0
        assert expected in " ".join(err.split())
    with nosync.checkpoints.serve(tmp_path):
        code, _, err = run(capsys, "checkpoint", "address", "../x", "--store", tmp_path)
        assert code == 1
        assert "not a valid name" in err


def test_an_address_by_an_ipv6_loopback(tmp_path: Path) -> None:
    try:
        door = nosync.checkpoints.serve(tmp_path, host="::1")
    except nosync.InvalidInputError:
        pytest.skip("this host has no IPv6")
    with door:
        assert door.address("q").startswith("webhdfs://[::1]:")
        client = Client(door.address("q"))
        client.create("x", b"1")
        assert client.read("x") == b"1"
