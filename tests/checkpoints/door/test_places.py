"""Where requests lead: nowhere without the secret, and never out of the checkpoints."""

from __future__ import annotations

import pytest

from nosync.checkpoints.door.places import Place, place_of_path, place_of_target
from nosync.checkpoints.door.remote_errors import RemoteError

SECRET = "ab" * 16


def refusal(target: bytes) -> str:
    with pytest.raises(RemoteError) as refused:
        place_of_target(target, SECRET)
    return refused.value.java_class.rpartition(".")[2]


@pytest.mark.parametrize(
    ("rest", "place"),
    [
        ("", Place("", "")),
        ("/", Place("", "")),
        ("/words", Place("words", "")),
        ("/words/", Place("words", "")),
        ("/words/offsets/7", Place("words", "offsets/7")),
        ("/words/a%20b%C3%A4", Place("words", "a bä")),
        ("/words/state/0/1/5_ab.changelog", Place("words", "state/0/1/5_ab.changelog")),
    ],
)
def test_places(rest: str, place: Place) -> None:
    assert place_of_target(f"/webhdfs/v1/{SECRET}{rest}".encode(), SECRET) == place


@pytest.mark.parametrize(
    "target",
    [
        "",
        "/",
        "/webhdfs/v1",
        "/webhdfs/v1/",
        "/webhdfs/v1//words",
        "/webhdfs/v1/words/offsets/0",
        f"/webhdfs/v1/{SECRET[:-1]}/words",
        f"/webhdfs/v1/{SECRET}0/words",
        f"/webhdfs/v1/x/{SECRET}/words",
        f"/webhdfs/v2/{SECRET}/words",
        f"/webhdfs/v1/../v1/{SECRET}/words",
        f"/webhdfs/v1/{SECRET.upper()}/words",
        f"http://127.0.0.1/webhdfs/v1/{SECRET}/words",
    ],
)
def test_without_the_secret_nothing_is_learnt(target: str) -> None:
    assert refusal(target.encode()) == "AccessControlException"


@pytest.mark.parametrize(
    "rest",
    [
        "/words/../other",
        "/words/..",
        "/..",
        "/../../etc/passwd",
        "/%2e%2e/etc/passwd",
        "/words/%2e%2e%2f%2e%2e/etc",
        "/words/..%2fother",
        "/words//offsets",
        "//etc/passwd",
        "/words/./offsets",
        "/words/a%00b",
        "/words/a%0Ab",
        "/words/a%ff",
        "/.writing/x",
        "/.address",
        "/LOCK",
        "/WORDS",
        "/words/LOCK",
        "/words/pins/a-b.json",
        "/w%2Fx%2F..%2F..",
        "/" + "x" * 65,
        "/words/" + "x/" * 600 + "y",
    ],
)
def test_what_is_no_path_of_a_file(rest: str) -> None:
    assert refusal(f"/webhdfs/v1/{SECRET}{rest}".encode()) == "IllegalArgumentException"


def test_a_destination_is_looked_at_in_the_same_way() -> None:
    assert place_of_path(f"/{SECRET}/words/offsets/1", SECRET) == Place("words", "offsets/1")
    for path in ("", "words/x", "/words/x", f"{SECRET}/words/x", f"//{SECRET}/words"):
        with pytest.raises(RemoteError, match="secret"):
            place_of_path(path, SECRET)
    with pytest.raises(RemoteError, match="not the path of a file"):
        place_of_path(f"/{SECRET}/words/../other/x", SECRET)
