"""Durable files that are looked at once more: peers could not use them, or they came here with a catalog from elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from pathlib import PurePosixPath

from nosync.lsm.errors import CorruptionError
from nosync.lsm.model.layer import LayerId
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.discards import Discards
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.quarantine import Quarantine
from nosync.lsm.platform.json_file import read_if_there, unseal_json
from nosync.lsm.platform.verified import is_verified_here, mark_verified
from nosync.lsm.trace.directory import LayerDirectory

_VALIDATED_AT_ONCE_BYTES = 64 << 20


class Rechecks:
    """Knows what of one directory is to be looked at. What is bad goes to quarantine."""

    def __init__(
        self,
        directory: LayerDirectory,
        layers: DurableLayers,
        quarantine: Quarantine,
        discards: Discards,
        announcer: Announcer,
        problems: MutableMapping[str, str],
    ) -> None:
        self._directory, self._env, self._layers, self._quarantine = directory, directory.env, layers, quarantine
        self._discards, self._announcer, self._problems = discards, announcer, problems
        self._suspects: dict[LayerId | PurePosixPath, None] = {}
        self._unvalidated: deque[LayerId] | None = None  # of a directory that came from elsewhere

    # --- what peers could not use -------------------------------------------------------------------------------------

    def suspect(self, ids: Iterable[LayerId], small: Iterable[PurePosixPath]) -> None:
        """Somebody could not use these files."""
        with self._layers.lock:
            self._suspects |= dict.fromkeys([*ids, *small])

    def look_at_suspects(self) -> None:
        """Looks at all bytes of what somebody could not use."""
        with self._layers.lock:
            suspects, self._suspects = self._suspects, {}
        self._quarantine.recheck([one for one in suspects if isinstance(one, LayerId)])
        for path in [one for one in suspects if isinstance(one, PurePosixPath)]:
            self._look_at_file(path)

    def _look_at_file(self, path: PurePosixPath) -> None:
        final = self._directory.root / path
        try:
            unseal_json(read_if_there(final, self._env), str(final))
        except FileNotFoundError:
            return
        except CorruptionError as error:
            self._problems[str(path)] = f"{error}; stop the daemon, and put a copy from a backup there, if there is one"
            if self._announcer.peers.copies_of_file(path) > 1:
                self._discards.set_aside([], [path])
                self._problems.pop(str(path), None)

    # --- what came from elsewhere -------------------------------------------------------------------------------------

    def begin_validating(self, ids: Iterable[LayerId]) -> None:
        """Looks at these layers by and by, unless this host looked at the directory before."""
        if not is_verified_here(self._directory.root):
            self._unvalidated = deque(ids)
            self.validate()

    def validate(self) -> None:
        """Looks at layers that a catalog lists which came along with them, a part of them each time."""
        if self._unvalidated is None:
            return
        size_bytes = 0
        for _ in range(len(self._unvalidated)):
            if size_bytes >= _VALIDATED_AT_ONCE_BYTES:
                break
            id = self._unvalidated.popleft()
            if self._env.stub(self._directory.path_of(id)) is not None:
                self._unvalidated.append(id)  # when it came
                continue
            with suppress(FileNotFoundError):
                size_bytes += self._env.size_bytes(self._directory.path_of(id))
            self._quarantine.recheck([id])
        if not self._unvalidated:
            mark_verified(self._directory.root, self._env)
            self._unvalidated = None
