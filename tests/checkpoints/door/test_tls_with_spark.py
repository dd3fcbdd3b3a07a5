"""Spark's own client over swebhdfs, with the certificates of daemons: it trusts the store's authority, and no other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nosync
from nosync.replication.transport.certs import make_certificates

pytestmark = pytest.mark.spark

PASSWORD = "changeit"
PROGRAM = """
import sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
address, source, output = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "1")
    .config("spark.hadoop.hadoop.ssl.hostname.verifier", "ALLOW_ALL")
    .getOrCreate()
)
rows = spark.readStream.schema("k string").option("maxFilesPerTrigger", 1).json(source)
counts = rows.groupBy("k").count().writeStream.outputMode("complete").trigger(availableNow=True)
write = lambda batch, t: batch.coalesce(1).write.mode("overwrite").json(f"{output}/{t}")
counts.foreachBatch(write).option("checkpointLocation", address).start().awaitTermination()
"""


def conf_dir(root: Path, ca: Path) -> Path:
    """Returns a Hadoop configuration that trusts an authority."""
    root.mkdir()
    store = root / "trust.p12"
    command = ["keytool", "-importcert", "-noprompt", "-alias", "nosync", "-file", str(ca), "-keystore", str(store)]
    subprocess.run([*command, "-storetype", "PKCS12", "-storepass", PASSWORD], check=True, capture_output=True)
    said = {"location": str(store), "password": PASSWORD, "type": "PKCS12"}
    properties = "".join(
        f"<property><name>ssl.client.truststore.{name}</name><value>{value}</value></property>"
        for name, value in said.items()
    )
    (root / "ssl-client.xml").write_text(f"<configuration>{properties}</configuration>")
    return root


def run(address: str, root: Path, conf: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HADOOP_CONF_DIR": str(conf), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", PROGRAM, address, str(root / "in"), str(root / "out")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.long("make checkpoints")
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("keytool") is None, reason="keytool comes with a JDK")
def test_a_query_writes_over_tls(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for t in range(3):
        (tmp_path / "in" / f"{t}.json").write_text('{"k": "a"}\n' * (t + 1))
    make_certificates(tmp_path / "tls", ["n1"])
    make_certificates(tmp_path / "others", ["n1"])
    tls = tmp_path / "tls"
    with nosync.checkpoints.serve(
        tmp_path / "data", host="0.0.0.0", certificate=tls / "n1.pem", key=tls / "n1.key"
    ) as door:
        address = door.address("words").replace("0.0.0.0", "127.0.0.1")
        assert address.startswith("swebhdfs://")
        refused = run(address, tmp_path, conf_dir(tmp_path / "wrong", tmp_path / "others" / "ca.pem"))
        assert refused.returncode != 0
        assert "PKIX path" in refused.stderr, refused.stderr[-3000:]
        assert not (tmp_path / "out").exists()
        done = run(address, tmp_path, conf_dir(tmp_path / "conf", tls / "ca.pem"))
        assert done.returncode == 0, done.stderr[-6000:]
    assert nosync.checkpoint("words", tmp_path / "data").status().safe == 2
    (part,) = (tmp_path / "out" / "2").glob("part-*.json")
    assert json.loads(part.read_text()) == {"k": "a", "count": 6}
