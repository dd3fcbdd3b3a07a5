"""Which of several files of one name is the store's: nodes may have put layers of an epoch that others did anew.

The manifest of the epoch lists the digest of each of its layers, on whatever branch the epoch is.
"""

from __future__ import annotations

from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId
from nosync.lsm.model.timestamp import epoch_of
from nosync.replication.remote.pack import Placed
from nosync.replication.remote.view import RemoteView


class ListedLayers:
    """The layers that the manifests of a store list."""

    def __init__(self, timelines: Timelines) -> None:
        self._logs = [timelines.manifests(branch) for branch in timelines.refs.names]
        self._of_epoch: dict[int, dict[LayerId, set[str]]] = {}

    def digests_of(self, layer: LayerId) -> set[str]:
        """Returns with which digests a layer is listed; none for one that was merged, or of an epoch that is not sealed."""
        t = epoch_of(layer.description.lower)
        if t not in self._of_epoch:
            found = self._of_epoch[t] = {}
            for manifest in (log.get(t) for log in self._logs):
                for entry in manifest.entries if manifest else ():
                    found.setdefault(entry.id, set()).add(entry.digest)
        return self._of_epoch[t].get(layer, set())

    def is_another(self, placed: Placed) -> bool:
        """Returns whether a file is not the layer that is listed under its name."""
        layer = placed.version.name.layer
        listed = self.digests_of(layer) if layer is not None else set()
        return bool(listed) and placed.version.digest not in listed

    def choose(self, view: RemoteView) -> None:
        """Has a view show, of layers of several contents, those that are listed."""
        for name, others in view.others.items():
            known = [view.files[name], *others]
            chosen = next((placed for placed in known if not self.is_another(placed)), None)
            if name.layer is not None and chosen is not None:
                view.files[name] = chosen
                view.others[name] = [one for one in known if one.version.digest != chosen.version.digest]
