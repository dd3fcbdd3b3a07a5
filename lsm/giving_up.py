"""What goes with contents that an operator gives up, because another node's count: all that was built upon them here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from nosync.lsm.archive import parse_name
from nosync.lsm.branches import BRANCHES
from nosync.lsm.directory import MANIFESTS, LayerDirectory
from nosync.lsm.layer import LayerId
from nosync.lsm.lines import Lines
from nosync.lsm.timestamp import pack


def built_upon(
    given_up: Iterable[PurePosixPath], directory: LayerDirectory, lines: Lines
) -> tuple[set[LayerId], set[PurePosixPath]]:
    """Of a manifest all that its line has from there on, layers that were merged with earlier ones included; of an entry of the
    log of branches those after it.
    """
    first: dict[str, int] = {}
    files: set[PurePosixPath] = set()
    for path in given_up:
        if path.parts[0] == MANIFESTS and (span := _epochs_of(path.name)) is not None:
            first[path.parts[1]] = min(span[0], first.get(path.parts[1], span[0]))
        elif path.parts[0] == BRANCHES:
            entries = [name for name in directory.env.list_dir(directory.root / BRANCHES) if name[:-5].isdigit()]
            files |= {path.with_name(name) for name in entries if int(name[:-5]) > int(path.stem)}
    layers: set[LayerId] = set()
    for line, t in first.items():
        names = directory.env.list_dir(directory.root / MANIFESTS / line)
        files |= {PurePosixPath(MANIFESTS, line, name) for name in names if (span := _epochs_of(name)) and span[1] >= t}
        for trace in {trace for piece in lines.of_line(line).pieces(t - 1) for trace, _ in piece.traces()}:
            layers |= {LayerId(trace, d) for d in directory.descriptions(trace) if d.upper > pack(t)}
    return layers, files


def _epochs_of(name: str) -> tuple[int, int] | None:
    number = name.removesuffix(".json")
    return (int(number), int(number)) if number.isdigit() else parse_name(name)
