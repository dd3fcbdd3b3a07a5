"""Names, timestamps, shards and paths."""

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosync.lsm.columnar.hashing import first_hash_of_group
from nosync.lsm.errors import InvalidInputError
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId, check_name, parse_path
from nosync.lsm.model.timestamp import MAX_EPOCH, MAX_ROUND, end_of, epoch_of, last_of, pack, parse, round_of, show

EPOCHS = st.integers(0, MAX_EPOCH)
ROUNDS = st.integers(0, MAX_ROUND)


@given(EPOCHS, ROUNDS, EPOCHS, ROUNDS)
def test_packed_time_keeps_the_lexicographic_order(e1: int, r1: int, e2: int, r2: int) -> None:
    assert (pack(e1, r1) < pack(e2, r2)) == ((e1, r1) < (e2, r2))
    assert (epoch_of(pack(e1, r1)), round_of(pack(e1, r1))) == (e1, r1)
    assert parse(show(pack(e1, r1))) == pack(e1, r1)


@given(st.integers(0, MAX_EPOCH - 1))
def test_an_epoch_is_the_interval_up_to_the_next(t: int) -> None:
    assert pack(t) <= last_of(t) < end_of(t) == pack(t + 1)


@pytest.mark.parametrize("epoch", [-1, MAX_EPOCH + 1, 1.5, "3", None, True])
def test_an_epoch_that_is_none_is_refused(epoch: object) -> None:
    with pytest.raises(InvalidInputError, match="not an epoch"):
        pack(epoch)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "-1", "1.", "1.0", "01", "1e3", "\u0663", "1.2.3", " 1"])
def test_other_spellings_of_a_timestamp_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"timestamp|integer"):
        parse(text)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "A", "a b", "-a", "x" * 65, "a\n", "ä", "a\0", None])
def test_names_that_could_escape_a_directory_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="not a valid name"):
        check_name(name, "stage name")


@given(st.integers(1, 300), st.integers(1, 300))
def test_shards_partition_the_key_groups(key_groups: int, count: int) -> None:
    groups = [g for i in range(count) for g in Shard(i, count).groups(key_groups)]
    assert groups == list(range(key_groups))
    for i in range(count):
        assert all(g * count // key_groups == i for g in Shard(i, count).groups(key_groups))


@given(st.integers(1, 32768), st.data())
def test_key_groups_are_ranges_of_hashes(key_groups: int, data: st.DataObject) -> None:
    group = data.draw(st.integers(0, key_groups - 1))
    first, end = first_hash_of_group(group, key_groups), first_hash_of_group(group + 1, key_groups)
    assert all(h * key_groups >> 32 == group for h in (first, end - 1))


@given(EPOCHS, EPOCHS, EPOCHS, st.integers(0, 5), st.integers(0, 6))
def test_a_layers_path_says_what_it_is(lower: int, upper: int, since: int, index: int, count: int) -> None:
    if (count and index >= count) or lower >= upper:
        return
    id = LayerId(TraceId("stage", "fp", Shard(index, count)), Description(pack(lower), pack(upper), pack(since)))
    assert parse_path(id.path) == id


@pytest.mark.parametrize(
    "path",
    ["s/f/0/1-2.layer", "s/f/0/1-2-3", "s/f/0/2-1-0.layer", "s/f/x/1-2-0.layer", "S/f/0/1-2-0.layer", "1-2-0.layer",
     "s/f/00/1-2-0.layer", "s/f/0/01-2-0.layer", "s/f/3of2/1-2-0.layer"],
)  # fmt: skip
def test_other_paths_are_not_layers(path: str) -> None:
    assert parse_path(PurePosixPath(path)) is None
