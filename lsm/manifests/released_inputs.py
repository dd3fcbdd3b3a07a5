"""Which inputs may be gone on a node: what the safe point has passed by now, and what went before.

The two are not the same. A branch that forks at an older epoch holds inputs back from then on, and after a rewind or a
promotion the safe point is another line's; but what was released is gone all the same, and is not lost. So a node writes
down, by timeline, up to where it let inputs go, before it does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.manifests.input_policy import NOTHING, is_released, releasable_until
from nosync.lsm.manifests.manifest import Entry, Manifest
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import check_name
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_small, replace_small, whole_number
from nosync.lsm.platform.layout import RELEASED
from nosync.lsm.platform.parsing import parsed

log = logging.getLogger("nosync")


@dataclass(frozen=True)
class Released:
    """Says up to which epoch inputs may be gone."""

    until: Epoch
    """By what is safe, and which branches there are."""
    went: Mapping[str, Epoch]
    """By timeline, up to where they were released."""

    @classmethod
    def of(cls, root: Path, env: Env, timelines: Timelines, safe: int | None) -> Released:
        """Returns what a directory let go, and what it may let go by now. `safe`: main's safe point."""
        went: dict[str, Epoch] = {}
        for line, until in read_released(root, env).items():
            for timeline, end in timelines.refs.left(line).items() if line in timelines.refs.timelines else ():
                went[timeline] = max(went.get(timeline, NOTHING), until if end is None else min(until, end))
        return cls(releasable_until(timelines, safe), went)

    def until_of(self, timeline: str) -> Epoch:
        """Returns up to which of the epochs that a timeline sealed inputs may be gone."""
        return max(self.until, self.went.get(timeline, NOTHING))

    def may_lack(self, manifest: Manifest, entry: Entry) -> bool:
        """Returns whether a layer need not be there any more."""
        return is_released(manifest, entry, self.until_of(manifest.timeline))


def read_released(root: Path, env: Env) -> dict[str, Epoch]:
    """Returns, by timeline that was main then, up to where this directory let inputs go. It is empty where none went."""
    path = root / RELEASED
    if not env.exists(path):
        return {}
    try:
        fields = read_small(path, env)
        with parsed("what inputs were released", str(path)):
            lines = {**fields.get("before", {}), fields["line"]: fields["safe"]}
            return {check_name(line, "timeline name"): Epoch(whole_number(t, "safe")) for line, t in lines.items()}
    except (CorruptionError, StorageError) as error:
        log.warning("%s", error)
        return {}


def write_released(root: Path, lines: Mapping[str, Epoch], line: str, env: Env) -> None:
    """Writes down up to where inputs go. `line`: the timeline that is main now, which versions before this one read alone."""
    left = {one: until for one, until in lines.items() if until > NOTHING}
    if not left:
        if env.exists(root / RELEASED):
            with storage_errors("remove", root / RELEASED):
                env.unlink(root / RELEASED)
                env.sync_dir(root)
        return
    line = line if line in left else min(left)
    before = {one: int(until) for one, until in sorted(left.items()) if one != line}
    replace_small(
        root, root / RELEASED, {"line": line, "safe": int(left[line]), **({"before": before} if before else {})}, env
    )
