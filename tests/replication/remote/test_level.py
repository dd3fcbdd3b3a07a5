"""The copies of a store: what goes into the bucket, what is acknowledged, and that nobody waits."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import RemoteError
from nosync.lsm.node.remote_status import read_remote_status
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.store_marker import read_marker
from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket, UnavailableError
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.level import RemoteLevel
from nosync.replication.remote.log import read_log
from nosync.replication.remote.names import position_of
from nosync.replication.remote.reach import remotely_safe
from nosync.testing.daemon_cluster import eventually
from nosync.testing.simulated_bucket import Fault, Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import NAMES, Copies, epochs, open_quiet


class Moved(Env):
    """A clock that the test moves."""

    now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s


def test_what_is_durable_goes_and_is_safe(open_store: OpenStore, bucket: Bucket) -> None:
    store = open_quiet(open_store)
    copies = Copies(store, bucket)
    assert copies.level.status().safe_point is None
    epochs(store, range(5))
    copies.push()
    status = copies.level.status()
    assert (status.safe_point, status.lag_epochs, status.lag_s, status.problem) == (4, 0, 0.0, "")
    contents = copies.contents()
    assert contents.reached.epochs == {"main": 4}
    for t in range(5):
        name = FileName(f"manifests/main/{t}.json")
        assert name in contents.places or contents.inventory.has_archived(name)
    for placed in contents.files():
        place = placed.place
        data = bucket.get_range(place.object, place.offset, place.offset + placed.version.size_bytes)
        assert data == (store.directory.root / placed.version.name).read_bytes()


def test_one_put_a_flush_and_none_where_nothing_is_new(open_store: OpenStore) -> None:
    store, objects = open_quiet(open_store), Objects()
    copies = Copies(store, SimulatedBucket(objects))
    copies.push()
    for t in range(10):
        epochs(store, range(t, t + 1), stages=("a", "b", "c", "d"))
        before = objects.calls["put"]
        copies.step()
        assert objects.calls["put"] == before + 1
        copies.step()
        assert objects.calls["put"] == before + 1
        assert copies.level.status().safe_point == t


def test_nothing_is_put_before_its_time(open_store: OpenStore) -> None:
    store, objects = open_quiet(open_store), Objects()
    copies = Copies(store, SimulatedBucket(objects), flush_s=1000.0)
    copies.step()
    before = objects.calls["put"]
    epochs(store, range(3))
    copies.step()
    assert objects.calls["put"] == before
    status = copies.level.status()
    assert (status.safe_point, status.lag_epochs) == (None, 3)
    assert status.waiting_bytes > 0
    copies.push()
    assert copies.level.status().safe_point == 2


def test_a_full_pack_goes_at_once(open_store: OpenStore) -> None:
    store, objects = open_quiet(open_store), Objects()
    copies = Copies(store, SimulatedBucket(objects), flush_s=1000.0, flush_bytes=2000, large_bytes=1 << 20)
    copies.step()
    before = objects.calls["put"]
    epochs(store, range(10))
    copies.step()
    assert objects.calls["put"] > before
    assert copies.level.status().waiting_bytes < 2000


def test_a_store_that_says_nothing_keeps_nobody_from_opening(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = threading.Event()

    class Silent(SimulatedBucket):
        def put_new(self, name: str, data: bytes | bytearray | memoryview) -> bool:
            said.wait(30.0)
            return super().put_new(name, data)

    monkeypatch.setattr("nosync.replication.remote.level._LOOK_AT_MOST_S", 0.05)
    copies = Copies(open_quiet(open_store), Silent())
    assert "it said nothing for 0.05 seconds" in copies.level.status().problem
    said.set()
    epochs(copies.store, range(2))
    copies.push()
    assert copies.level.status().safe_point == 1


def test_what_was_merged_since_does_not_go_twice(open_store: OpenStore) -> None:
    store, objects = open_quiet(open_store), Objects()
    copies = Copies(store, SimulatedBucket(objects))
    changed = 0
    for t in range(64):
        rows = pa.table({"k": [f"{t}-{i}" for i in range(200)], "n": [t] * 200})
        changed += store.append("counts", t=t, rows=rows, key=["k"]).size_bytes
        store.seal(t)
        store.sync()
        while store.node.merge_once():  # type: ignore[attr-defined]
            pass
        if t % 5 == 0:
            copies.step()
    copies.push()
    assert copies.level.status().safe_point == 63
    assert objects.put_bytes <= 1.5 * changed


def test_a_merged_layer_takes_the_place_of_much_that_it_shrinks(open_store: OpenStore) -> None:
    store, bucket = open_quiet(open_store, retain=0), SimulatedBucket()
    copies = Copies(store, bucket)
    rows = pa.table({"k": [f"{i}" for i in range(500)], "n": [0] * 500})
    for t in range(12):
        store.append("counts", t=t, rows=rows.set_column(1, "n", pa.array([t] * 500)), key=["k"])
        store.seal(t)
        store.sync()
        copies.step()
    before = copies.contents()
    assert len(before.inventory.layers("counts/raw/0")) == 12
    store.compact()
    copies.push()
    store.append("counts", t=12, rows=rows, key=["k"])
    store.seal(12)
    store.sync()
    copies.push()  # what it stands for is dropped with the next pack
    after = copies.contents()
    assert len(after.inventory.layers("counts/raw/0")) == 2
    assert copies.level.status().safe_point == 12
    assert after.reached.epochs == {"main": 12}


class Faults:
    """Says of each call what becomes of it, as a test wants it."""

    def __init__(self) -> None:
        self.next: Fault = ""

    def __call__(self, call: str, name: str) -> Fault:
        return self.next if call == "put" and "/packs/" in name else ""


def test_a_put_that_was_not_answered_is_no_copy_until_it_is_known(open_store: OpenStore) -> None:
    store, faults = open_quiet(open_store), Faults()
    copies = Copies(store, SimulatedBucket(fault=faults))
    epochs(store, range(2))
    copies.push()
    epochs(store, range(2, 4))
    faults.next = "after"  # it has its effect, and says nothing
    copies.step()
    assert copies.level.status().safe_point == 1
    assert "timed out" in copies.level.status().problem
    faults.next = ""
    epochs(store, range(4, 6))
    copies.push()
    assert copies.level.status().safe_point == 5
    assert copies.level.status().problem == ""
    assert copies.contents().reached.epochs == {"main": 5}


def test_what_waits_while_the_store_is_away_is_bounded_and_catches_up(open_store: OpenStore) -> None:
    store, faults, objects = open_quiet(open_store), Faults(), Objects()
    copies = Copies(store, SimulatedBucket(objects, faults), flush_bytes=3000)
    epochs(store, range(2))
    copies.push()
    faults.next = "before"
    for t in range(2, 60):
        epochs(store, range(t, t + 1))
        copies.level._retry_s = 0.0
        copies.step()
        assert len(copies.level._uploader._builder.body) < 8000  # type: ignore[union-attr]
    while store.node.merge_once():  # type: ignore[attr-defined]
        pass
    status = copies.level.status()
    assert (status.safe_point, status.lag_epochs) == (1, 58)
    assert "503" in status.problem
    faults.next = ""
    copies.push()
    assert copies.level.status().safe_point == 59


def test_another_object_under_the_name_of_a_pack_is_no_copy(open_store: OpenStore) -> None:
    store, bucket = open_quiet(open_store), SimulatedBucket()
    copies = Copies(store, bucket)
    copies.push()
    bucket.put_new(copies.level._uploader.writer.next_pack(), b"of somebody else")  # type: ignore[union-attr]
    epochs(store, range(2))
    copies.step()
    assert copies.level.status().safe_point is None
    assert "other bytes than this writer's" in copies.level.status().problem


def test_a_damaged_layer_is_not_copied_and_is_named(open_store: OpenStore) -> None:
    store, bucket = open_quiet(open_store), SimulatedBucket()
    copies = Copies(store, bucket)
    epochs(store, range(3))
    path = store.directory.root / "layers/counts/raw/0/1-2-0.layer"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    copies.step()
    status = copies.level.status()
    assert status.safe_point == 0
    assert "1-2-0.layer" in status.problem
    assert "layers/counts/raw/0/1-2-0.layer" not in copies.contents().places


def test_a_damaged_file_that_is_gone_is_no_problem_any_more(open_store: OpenStore) -> None:
    store = open_quiet(open_store)
    copies = Copies(store, SimulatedBucket())
    stray = store.directory.root / "checkpoints/words/offsets/0"
    epochs(store, range(3))
    copies.push()
    uploader = copies.level._uploader
    assert uploader is not None
    uploader.damaged["checkpoints/words/offsets/0"] = f"{stray}: bits were flipped"
    copies.step()
    assert "bits were flipped" in copies.level.status().problem
    copies.push()
    assert copies.level.status().problem == ""


def test_who_waits_for_a_slow_store_waits_no_longer_than_it_says(open_store: OpenStore) -> None:
    """Each PUT takes a second, and there are many packs and large files."""
    env = Moved()
    store = open_quiet(open_store, env=env)

    def fault(call: str, name: str) -> Fault:
        env.now_s += float(call == "put")
        return ""

    copies = Copies(store, SimulatedBucket(fault=fault), flush_bytes=2000, large_bytes=4000)
    rows = pa.table({"k": [f"key{i}" for i in range(3000)], "n": list(range(3000))})
    for t in range(30):
        store.append("large", t=t, rows=rows, key=["k"])
        for n in range(4):
            store.append(f"small{n}", t=t, rows=rows.slice(t, 30), key=["k"])
        store.seal(t)
    store.sync()
    began_s = env.monotonic_s()
    assert not copies.level.push(5.0)
    assert env.monotonic_s() - began_s <= 10, "with the PUT that was going on, and those that begin a log"
    for _ in range(200):
        if copies.level.push(5.0):
            break
    assert copies.level.status().safe_point == 29


def test_what_cannot_be_listed_is_shown_and_all_is_pushed(open_store: OpenStore) -> None:
    forbidden = set[str]()

    def fault(call: str, name: str) -> Fault:
        return "before" if call in forbidden else ""

    store = open_quiet(open_store)
    copies = Copies(store, SimulatedBucket(fault=fault), grace_s=0.0)
    epochs(store, range(3))
    copies.push()
    forbidden.add("list")
    epochs(store, range(3, 5))
    copies.level._collect_s = 0.0
    copies.push()
    status = copies.level.status()
    assert (status.safe_point, "cannot list" in status.problem) == (4, True)


# --- branches -----------------------------------------------------------------------------------------------------------


def test_branches_rewinds_and_pins_go_too(open_store: OpenStore) -> None:
    store, bucket = open_quiet(open_store), SimulatedBucket()
    copies = Copies(store, bucket)
    epochs(store, range(8))
    store.pin("before", 3)
    copies.push()
    store.rewind(5)
    assert copies.level.status().safe_point == 5
    epochs(store, range(6, 7), mark="b")
    copies.push()
    contents = copies.contents()
    assert copies.level.status().safe_point == 6
    assert contents.reached.entries == 1
    assert remotely_safe(store.node.timelines, contents.reached, "before-rewind-1") == 7
    assert any(name.startswith("pins/before-") for name in contents.places)


def test_manifests_that_no_branch_needs_are_dropped(open_store: OpenStore) -> None:
    store, bucket = open_quiet(open_store), SimulatedBucket()
    copies = Copies(store, bucket)
    epochs(store, range(3))
    copies.push()
    store.rewind(0, keep_as="")
    epochs(store, range(1, 2), mark="b")
    copies.push()
    epochs(store, range(2, 3), mark="b")
    copies.push()
    names = set(copies.contents().places)
    assert "manifests/main/0.json" in names
    assert not names & {"manifests/main/1.json", "manifests/main/2.json"}
    assert copies.level.status().safe_point == 2


# --- the thread, and what is shown ---------------------------------------------------------------------------------------


def test_an_embedded_store_copies_in_the_background(tmp_path: Path, s3: str) -> None:
    url = f"{s3}/{tmp_path.name}"
    with nosync.open(tmp_path / "store", remote=nosync.RemoteSettings(url, flush_s=0.1)) as store:
        epochs(store, range(3))
        eventually("all is remotely safe", lambda: store.status().remotes[0].safe_point == 2)
        (status,) = store.status().remotes
        assert (status.url, status.lag_epochs, status.problem) == (url, 0, "")
        eventually(
            "others read that, too",
            lambda: [one.safe_point for one in read_remote_status(tmp_path / "store", Env())] == [2],
        )
        with nosync.open(tmp_path / "store", read_only=True) as reader:
            assert reader.status().remotes[0].safe_point == 2
        epochs(store, range(3, 5))
        store_id = read_marker(tmp_path / "store", Env()).store_id
    contents = read_log(open_bucket(url), NAMES, store_id)
    assert contents is not None
    assert contents.reached.epochs == {"main": 4}  # closing had put everything
    with nosync.open(tmp_path / "store", remote=url) as store:
        store.sync_remote()
        assert store.status().remotes[0].safe_point == 4


def test_several_remotes(tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/a", f"file://{tmp_path}/b"]
    with nosync.open(tmp_path / "store", remote=urls) as store:
        epochs(store, range(2))
        store.sync_remote()
        assert [(one.url, one.safe_point) for one in store.status().remotes] == [(url, 1) for url in urls]
    with pytest.raises(nosync.InvalidInputError, match="names a place twice"):
        nosync.open(tmp_path / "store", remote=[urls[0], urls[0]])


def test_a_store_that_is_away_keeps_nobody_from_working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLEEXAMPLE12")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SeCrEtSeCrEtSeCrEtSeCrEt/42")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    settings = nosync.RemoteSettings("s3://copies/x", flush_s=0.05, close_s=0.2)
    with nosync.open(tmp_path / "store", remote=settings) as store:
        epochs(store, range(3))
        assert store.safe_point() == 2
        (status,) = store.status().remotes
        assert (status.safe_point, status.lag_epochs) == (None, 3)
        assert "cannot be reached" in status.problem
        with pytest.raises(RemoteError, match="not all is there"):
            store.sync_remote(0.2)
    with nosync.open(tmp_path / "store") as store:
        assert store.status().remotes == ()
        with pytest.raises(RemoteError, match="without remote="):
            store.sync_remote()


@pytest.mark.parametrize(
    ("remote", "why"),
    [("ftp://x/y", "not known"), ("s3://nowhere-at-all/x", "no such bucket"), ("bucket", "not the URL")],
)
def test_what_cannot_be_a_remote_is_refused_at_once(tmp_path: Path, s3: str, remote: str, why: str) -> None:
    with pytest.raises(nosync.NosyncError, match=why):
        nosync.open(tmp_path / "store", remote=remote)
    with nosync.open(tmp_path / "store") as store:  # and the directory is free
        epochs(store, range(1))


def test_no_credential_is_written_anywhere(
    tmp_path: Path, s3: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    import logging

    from tests.helpers.s3 import KEY, SECRET

    caplog.set_level(logging.DEBUG)
    url = f"{s3}/{tmp_path.name}"
    with nosync.open(tmp_path / "store", remote=url) as store:
        epochs(store, range(3))
        store.sync_remote()
        said = f"{store.status()} {store.status()._repr_html_()} {store!r}"
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            said += path.read_bytes().decode("latin-1")
    bucket = open_bucket(url)
    for one in bucket.list("nodes/"):
        said += bucket.get(one.name).decode("latin-1")
    out = capfd.readouterr()
    said += caplog.text + out.out + out.err
    assert KEY not in said
    assert SECRET not in said


def test_the_error_of_a_bucket_that_refuses_is_shown_and_jobs_go_on(open_store: OpenStore) -> None:
    class Refusing(SimulatedBucket):
        refuses = False

        def put_new(self, name: str, data: bytes | bytearray | memoryview) -> bool:
            if self.refuses:
                raise RemoteError("the permission s3:PutObject is missing")
            return super().put_new(name, data)

    store, bucket = open_quiet(open_store), Refusing()
    copies = Copies(store, bucket)
    copies.push()
    bucket.refuses = True
    epochs(store, range(2))
    copies.step()
    assert "s3:PutObject is missing" in copies.level.status().problem
    bucket.refuses = False
    copies.push()
    assert copies.level.status().safe_point == 1


def test_a_bucket_that_cannot_be_reached_is_no_error_of_start(open_store: OpenStore) -> None:
    down = True

    def fault(call: str, name: str) -> Fault:
        return "before" if down else ""

    store = open_quiet(open_store)
    copies = Copies(store, SimulatedBucket(fault=fault))
    epochs(store, range(2))
    copies.step()
    assert copies.level.status().lag_epochs == 2
    down = False
    copies.push()
    assert copies.level.status().safe_point == 1


def test_names_in_the_log_are_in_order(open_store: OpenStore) -> None:
    store, bucket = open_quiet(open_store), SimulatedBucket()
    copies = Copies(store, bucket)
    for t in range(12):
        epochs(store, range(t, t + 1))
        copies.step()
    positions = [position_of(one.name) for one in bucket.list(NAMES.packs)]
    assert positions == sorted(positions)  # type: ignore[type-var]
    assert len(set(positions)) == 12
    assert issubclass(UnavailableError, RemoteError)


def test_closing_while_the_object_store_is_away_waits_in_peace(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It asked as fast as it could, and logged each answer, for each says how long it took."""
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:9", "REGION": "us-east-1", "SECRET_ACCESS_KEY": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    store = open_store(remote=nosync.RemoteSettings("s3://bucket/prefix", close_s=2.0))
    epochs(store, range(2))
    steps = list[int]()
    step = RemoteLevel._step
    monkeypatch.setattr(RemoteLevel, "_step", lambda self, **how: (steps.append(1), step(self, **how))[1])
    store.close()
    assert len(steps) < 100
    assert len([one for one in caplog.records if one.levelname == "ERROR"]) < 10
