"""A store that is read from its copies in a bucket: `nosync.connect("s3://...")`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from nosync.lsm.errors import NotAvailableError, RemoteError
from nosync.lsm.facts.seal_times import SealTimes
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.as_of import shown_time
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.api import StoreBackend
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import MARKER
from nosync.lsm.platform.store_marker import create_store, read_marker
from nosync.lsm.settings import StoreSettings
from nosync.lsm.status import StoreStatus
from nosync.lsm.store.epoch_times import EpochTimes
from nosync.lsm.store.store import Store
from nosync.lsm.store.timelines_view import EndChecks
from nosync.lsm.trace.directory import LayerDirectory
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.bucket_env import BucketEnv, not_written
from nosync.replication.remote.fence import read_store
from nosync.replication.remote.patient import PatientBucket
from nosync.replication.remote.reach import remotely_safe


class _NoEnds(EndChecks):
    """What is seen of a bucket is whole: what comes after it is not lost, it was not copied yet."""

    def check_log(self, timelines: Timelines) -> None:
        """Nothing is lost."""

    def check_newest(self, timelines: Timelines, branch: str) -> None:
        """Nothing is lost."""


class _TimesOfCopies(EpochTimes):
    """The times of epochs in a bucket, which may be there before the epochs are."""

    def __init__(self, times: SealTimes, url: str) -> None:
        super().__init__(times)
        self._url = url

    def read_anew(self, times: SealTimes) -> EpochTimes:
        """See EpochTimes."""
        return _TimesOfCopies(times, self._url)

    def _written_us(self, manifests: ManifestLog, t: Epoch) -> int | None:
        return None  # its file here is as old as the look at the bucket

    def epoch_at(self, timelines: Timelines, branch: str, us: int, *, before_first: int | None = None) -> int:
        """See EpochTimes. Raises NotAvailableError, too, where an epoch of then is not whole there yet."""
        last, times = timelines.last_sealed(branch), self._times.of_timeline(timelines.timeline(branch).id)
        for t, time in times.items():
            if (last is None or t > last) and time.sealed_us <= us:
                raise NotAvailableError(
                    f"branch {branch}, as of {shown_time(us)}: that is epoch {t} or a later one, and {self._url} has "
                    f"{'no epoch' if last is None else f'epochs up to {last}'} until copies come that far. Ask again then, or "
                    "give the number of an epoch"
                )
        return super().epoch_at(timelines, branch, us, before_first=before_first)


class BucketStore(Store):
    """Reads, lookups, change feeds, diffs and branches work as they do beside the files. Made by `nosync.connect`."""

    def __init__(
        self, directory: LayerDirectory, env: BucketEnv, url: str, temporary: TemporaryDirectory[str] | None
    ) -> None:
        """`temporary`: where what was fetched is kept, if only until it is closed."""
        super().__init__(directory, StoreSettings(), None, _NoEnds(directory))
        self.env, self.url, self._temporary = env, url, temporary
        self._times = _TimesOfCopies(SealTimes(directory.root, env), url)

    @property
    def node(self) -> StoreBackend:
        """Raises StorageError: the store is elsewhere."""
        raise not_written(self.url)

    def safe_point(self, branch: str = MAIN) -> int | None:
        """Returns the newest epoch that is remotely safe: up to there it is seen."""
        return remotely_safe(self._timelines(), self.env.view.reached, branch)

    def _safe_point_now(self) -> int | None:
        return self.safe_point()

    def status(self) -> StoreStatus:
        """See Store."""
        found = super().status()
        older = dict.fromkeys(self.env.view.problems, "so what is read may be older than what was copied")
        return replace(found, path=self.url, sealed_at=None, problems={**found.problems, **older})

    def close(self) -> None:
        """Forgets what was fetched, unless `cache=` was given."""
        if not self._closed:
            super().close()
            if self._temporary is not None:
                self._temporary.cleanup()

    def __repr__(self) -> str:
        return f"<nosync.Store at {self.url} ({'closed' if self._closed else 'connected'})>"


def connect_bucket(bucket: Bucket, cache: Path | None) -> Store:
    """Returns the store of which a bucket has copies. See `nosync.connect`."""
    marker, temporary = read_store(PatientBucket(bucket, Env())), None
    if cache is None:
        temporary = TemporaryDirectory(prefix="nosync-")
        cache = Path(temporary.name, "store")
    if not (cache / MARKER).exists():
        create_store(cache, marker.key_groups, Env(), store_id=marker.store_id)
    found = read_marker(cache, Env())
    if found != marker:
        raise RemoteError(
            f"{cache} keeps what was fetched of store {found.store_id}, and {bucket.url} has store {marker.store_id}: give "
            "another cache="
        )
    env = BucketEnv(cache, bucket)
    return BucketStore(LayerDirectory(cache, marker.key_groups, env), env, bucket.url, temporary)
