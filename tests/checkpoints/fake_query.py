"""A checkpoint as a Structured Streaming query writes it, without Spark: small, and of every kind of state store."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path

import pyarrow as pa

KINDS = ("hdfs", "rocksdb", "changelog", "v2")


class FakeQuery:
    """Writes batches into a directory. Two operators: one with a store, one with two named stores, as a join has."""

    def __init__(self, root: Path, kind: str, *, partitions: int = 2, snapshot_every: int = 3) -> None:
        self.root, self.kind, self.partitions, self.snapshot_every = root, kind, partitions, snapshot_every
        self.source = "in_a" if kind == "v2" else "0"
        """How its file source is called: queries of Spark 4.2 and later may name theirs."""
        self.batch = -1
        self.code = ""
        """What its code is, where it is another one than usual: it makes other states."""
        self.ids: dict[str, str] = {}
        self.write("metadata", json.dumps({"id": "4c0c1a0e-0000-4000-8000-000000000000"}))
        self.stores = [(0, p, "") for p in range(partitions)]
        self.stores += [
            (1, p, name) for p in range(partitions) for name in ("left-keyToNumValues", "right-keyToNumValues")
        ]
        for operator, names in ((0, ["default"]), (1, ["left-keyToNumValues", "right-keyToNumValues"])):
            info = [{"storeName": name, "numColsPrefixKey": 0, "numPartitions": partitions} for name in names]
            said = {"operatorInfo": {"operatorId": operator, "operatorName": "x"}, "stateStoreInfo": info}
            self.write(f"state/{operator}/_metadata/metadata", "v1\n" + json.dumps(said))
        for operator, partition, name in self.stores:
            self.write(f"{self.directory(operator, partition, name)}/_metadata/schema", "v3 of a schema")

    def directory(self, operator: int, partition: int, name: str) -> str:
        return f"state/{operator}/{partition}" + (f"/{name}" if name else "")

    def write(self, path: str, data: str | bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        making = target.with_name(f".{target.name}.tmp")
        making.write_bytes(data.encode() if isinstance(data, str) else data)
        making.rename(target)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def begin(self, offsets: str = "") -> int:
        """Writes what a batch reads, and returns its number: as far as a query comes that dies in the middle.

        `offsets`: what its offsets say in the place of what they say usually.
        """
        self.batch += 1
        t = self.batch
        log = f"sources/{self.source}"
        self.write(f"{log}/{t}", f"v1\n{json.dumps({'path': f'f{t}', 'batchId': t})}")
        if t % 4 == 3:
            self.write(f"{log}/{t}.compact", f"v1\nall up to {t}")
            self.remove(f"{log}/{t}")
        conf = {"conf": {"spark.sql.shuffle.partitions": str(self.partitions)}}
        version, end = ("v1", "") if self.source == "0" else ("v2", f"{self.source}:")
        said = f"{version}\n{json.dumps(conf)}\n{end}{json.dumps({'logOffset': t})}"
        self.write(f"offsets/{t}", offsets or said)
        return t

    def states(self) -> None:
        """Writes the states after the batch."""
        version = self.batch + 1
        for operator, partition, name in self.stores:
            directory = self.directory(operator, partition, name)
            suffix = f"_{operator}{partition}{version}{len(name)}-abc{self.code}" if self.kind == "v2" else ""
            self.ids[directory, version] = suffix[1:]  # type: ignore[index]
            is_base = version % self.snapshot_every == 0
            content = f"{directory} {version}{self.code}"
            if self.kind == "hdfs":
                self.write(f"{directory}/{version}.delta", content)
                if is_base:
                    self.write(f"{directory}/{version}.snapshot", "all of " + content)
            else:
                if self.kind != "rocksdb":
                    text = self.with_lineage(directory, version, content) if self.kind == "v2" else content
                    self.write(f"{directory}/{version}{suffix}.changelog", text)
                if self.kind == "rocksdb" or is_base:
                    self.snapshot(directory, version, suffix)

    def with_lineage(self, directory: str, version: int, content: str) -> bytes:
        """Returns a changelog as format v2 has it: what it goes on from comes first, in a block of lz4-java's stream."""
        first = max(1, (version - 1) - (version - 1) % self.snapshot_every)
        items = [{"version": v, "checkpointUniqueId": self.ids[directory, v]} for v in range(first, version)]  # type: ignore[index]
        said = json.dumps(items).encode()
        data = b"\x00\x02v3" + len(said).to_bytes(2, "big") + said + content.encode()
        packed = pa.compress(data, codec="lz4_raw", asbytes=True)
        return b"LZ4Block" + struct.pack("<BIII", 0x25, len(packed), len(data), 0) + packed

    def snapshot(self, directory: str, version: int, suffix: str) -> None:
        """Writes the zip file of a RocksDB snapshot, and the SST files that it names, of which it shares one."""
        shared, own = f"000001-{directory.replace('/', '')}.sst", f"{version:06}-own{suffix}{self.code}.sst"
        for sst, data in ((shared, b"shared"), (own, b"own" * version)):
            if not (self.root / directory / "SSTs" / sst).exists():
                self.write(f"{directory}/SSTs/{sst}", data)
        files = [
            {
                "localSstFileName": name,
                "dfsSstFileName": name,
                "sizeBytes": (self.root / directory / "SSTs" / name).stat().st_size,
            }
            for name in (shared, own)
        ]
        text = "v1\n" + json.dumps({"sstFiles": files, "logFiles": [], "numKeys": 1})
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr("metadata", text)
        self.write(f"{directory}/{version}{suffix}.zip", made.getvalue())

    def commit(self) -> None:
        """Writes that the batch is done."""
        said: dict[str, object] = {"nextBatchWatermarkMs": 0}
        if self.kind == "v2":
            version, ids = self.batch + 1, {}
            for operator, names in ((0, [""]), (1, ["left-keyToNumValues", "right-keyToNumValues"])):
                ids[str(operator)] = [
                    [self.ids[self.directory(operator, p, name), version] for name in names]  # type: ignore[index]
                    for p in range(self.partitions)
                ]
            said["stateUniqueIds"] = ids
        self.write(f"commits/{self.batch}", f"v{2 if self.kind == 'v2' else 1}\n{json.dumps(said)}")

    def run(self, batches: int = 1) -> None:
        """Runs batches to their end."""
        for _ in range(batches):
            self.begin()
            self.states()
            self.commit()
