"""What deploy/ gives a daemon: what it needs, and nothing else."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MOST_EXPOSED = 3.0


def directives() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "nosync.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_may_do_what_a_daemon_does_and_no_more() -> None:
    said = directives()
    expected = {
        "User": "nosync", "UMask": "0027", "StateDirectoryMode": "0750", "NoNewPrivileges": "true",
        "CapabilityBoundingSet": "", "AmbientCapabilities": "", "PrivateUsers": "true", "RestrictSUIDSGID": "true",
        "ProtectSystem": "strict", "ReadWritePaths": "/var/lib/nosync", "ProtectHome": "true", "PrivateTmp": "true",
        "PrivateDevices": "true", "ProtectClock": "true", "ProtectHostname": "true", "ProtectKernelLogs": "true",
        "ProtectKernelModules": "true", "ProtectKernelTunables": "true", "ProtectControlGroups": "true",
        "ProtectProc": "invisible", "RestrictNamespaces": "true", "RestrictRealtime": "true", "LockPersonality": "true",
        "MemoryDenyWriteExecute": "true", "SystemCallArchitectures": "native", "LimitCORE": "0",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    }  # fmt: skip
    assert {name: said.get(name) for name in expected} == {name: [value] for name, value in expected.items()}
    assert said["SystemCallFilter"] == ["@system-service", "~@privileged"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_calls_the_unit_safe() -> None:
    ran = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(DEPLOY / "nosync.service")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "Unknown command" in ran.stderr or "unrecognized option" in ran.stderr:
        pytest.skip("this systemd-analyze reads no files")
    found = re.search(r"Overall exposure level for nosync.service: ([0-9.]+)", ran.stdout)
    assert found, ran.stdout + ran.stderr
    assert float(found[1]) <= MOST_EXPOSED


def test_the_image_is_not_run_as_root_and_needs_nothing() -> None:
    lines = [line for line in (DEPLOY / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    stages = "\n".join(lines).split("\nFROM ")
    last = stages[-1]
    assert re.search(r"^USER 1000:1000$", last, re.MULTILINE), "by number, so that Kubernetes sees that it is not root"
    assert last.index("USER") < last.index("ENTRYPOINT")
    assert "HEALTHCHECK" in last
    assert "COPY . " not in last, "sources, and what lies beside them, are not in the image"
    assert "0.0.0.0" not in "\n".join(lines)


def is_sent(path: str) -> bool:
    """Whether the builder of an image gets a file, as .dockerignore says: the last pattern that fits counts."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            parts = path.split("/")
            at = parts if "**/" in line else parts[:1]
            if any(fnmatch.fnmatch(part, pattern) for part in at):
                sent = line.startswith("!")
    return sent


@pytest.mark.parametrize(
    "path",
    [
        "tls/ca.key", "tls/n1.pem", "ca.key", "deploy/tls/n1.key", "nosync/n1.key", "lsm/tls/n1.pem", ".env", ".git/config",
        "d1/layers/x.layer", "id_rsa", "node.toml", "nosync-demo/store/NOSYNC", "bench/results/x.json",
    ],
)  # fmt: skip
def test_no_key_and_no_data_goes_into_an_image(path: str) -> None:
    assert not is_sent(path)


def test_all_that_is_installed_goes_into_an_image() -> None:
    for path in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "nosync/cli/__init__.py",
        "lsm/platform/env.py",
        "proto/v1/__init__.py",
    ):
        assert is_sent(path)


@pytest.mark.parametrize("path", ["ca.key", "tls/n1.key", "tls/ca.pem", "deploy/tls/n1.pem", "tls/revoked", "a/n1.p12"])
def test_no_key_goes_into_the_repository(path: str) -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no checkout")
    ran = subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False)
    assert ran.returncode == 0


def documents() -> dict[str, dict[str, Any]]:
    """The objects of deploy/kubernetes.yaml by their kinds, as Kubernetes reads them."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    command = ["kubectl", "label", "--local", "-f", str(DEPLOY / "kubernetes.yaml"), "-o", "json", "read=here"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = {}
    text, at = ran.stdout.strip(), 0
    while at < len(text):
        one, at = json.JSONDecoder().raw_decode(text, at)
        found[one["kind"]] = one
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


def test_kubernetes_reads_that_pods_may_do_little() -> None:
    found = documents()
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    (one,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= one.keys()
    assert one["resources"]["limits"].keys() >= {"cpu", "memory"}
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert secret["defaultMode"] == 0o400
    (policy,) = [found["NetworkPolicy"]["spec"]]
    assert policy["podSelector"] == {"matchLabels": {"app": "nosync"}}
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]
    who = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    assert who.keys() == {7500, 7501}
    assert all("podSelector" in peer for peer in who[7500])
    assert "0.0.0.0" not in json.dumps(one), "neither metrics nor the daemon are on all addresses"


@pytest.mark.parametrize(
    "line",
    [
        "runAsNonRoot: true", "readOnlyRootFilesystem: true", 'capabilities: {drop: ["ALL"]}', "kind: NetworkPolicy",
        "allowPrivilegeEscalation: false", "secret: {secretName: nosync-tls, defaultMode: 0400}", "livenessProbe:",
        "readinessProbe:", "startupProbe:", "seccompProfile: {type: RuntimeDefault}", "automountServiceAccountToken: false",
    ],
)  # fmt: skip
def test_the_manifest_says_so_where_there_is_no_kubectl(line: str) -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    assert line in [one.strip() for one in text.splitlines()]
    assert re.search(r"limits: \{.*memory: ", text)
    assert "--metrics 0.0.0.0" not in text


def test_who_may_do_what_is_said_in_fifteen_lines() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    before, *details = text.split("\n## ")
    assert len([line for line in before.splitlines()[1:] if line]) <= 15
    assert [part.splitlines()[0] for part in details][:3] == [
        "A data directory",
        "Files of somebody else",
        "On the wire",
    ]


def test_how_to_report_names_no_address_that_may_not_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "vulnerability reporting" in " ".join(text.split())
    assert "@" not in text
