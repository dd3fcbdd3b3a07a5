"""The store against a dict of dicts: any sequence of appends, seals, reads, merges, rewinds, pins, crashes and power
cuts.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import nosync
from nosync.lsm.platform.file_pool import FilePool
from nosync.testing import FaultyEnv, crash
from tests.helpers.depth import examples
from tests.helpers.oracles import State, colliding, state_of

KEYS = st.integers(0, 9)
SHARDS = 2
KEY = ["k"]


class StoreMachine(RuleBasedStateMachine):
    """`states[t]` is what the store must say of epoch t, `kept` what it must say of branches that a rewind left.

    `merged_until`: before this epoch history may have been merged away before the last rewind.
    """

    @initialize(retain=st.sampled_from([None, 0, 2, 5]), collide=st.booleans())
    def start(self, retain: int | None, collide: bool) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.env = FaultyEnv()
        self.retain, self.hasher = retain, colliding if collide else None
        self.states: dict[int, State] = {-1: {}}
        self.pins: dict[str, int] = {}
        self.kept: dict[str, dict[int, State]] = {}
        self.merged_until = self.names = 0
        self.open()

    def open(self) -> None:
        options = {"hasher": self.hasher} if self.hasher else {}
        self.store = nosync.open(
            self.root / "s",
            key_groups=4,
            env=self.env,
            settings=nosync.StoreSettings(retain=self.retain, background=False, block_rows=3, grace_s=0.0, retry_s=0.0),
            **options,  # type: ignore[arg-type]
        )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.root)

    @property
    def last(self) -> int:
        return max(self.states)

    def readable(self) -> range:
        held = [self.last if self.retain is None else self.last - self.retain, *self.pins.values()]
        return range(0 if self.retain is None else max(self.merged_until, min(held)), self.last + 1)

    @rule(rows=st.dictionaries(KEYS, st.integers(-9, 9), max_size=6), deletes=st.sets(KEYS, max_size=3))
    def epoch(self, rows: dict[int, int], deletes: set[int]) -> None:
        t, state = self.last + 1, dict(self.states[self.last])
        gone = deletes - rows.keys()
        for shard in range(SHARDS):
            mine = {k: v for k, v in rows.items() if k % SHARDS == shard}
            self.store.append(
                "kv",
                t=t,
                shard=shard,
                key=KEY,
                rows=pa.table({"k": pa.array(mine, pa.int64()), "v": pa.array(mine.values(), pa.int64())}),
                deletes=pa.table({"k": pa.array([k for k in gone if k % SHARDS == shard], pa.int64())}),
            )
        self.store.seal(t)
        for k in gone:
            state.pop((k,), None)
        self.states[t] = state | {(k,): (v,) for k, v in rows.items()}

    @precondition(lambda self: self.last >= 0)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        t = data.draw(st.sampled_from(self.readable()))
        expected = self.states[t]
        assert state_of(self.store.read("kv", as_of=t), KEY) == expected
        keys = data.draw(st.lists(KEYS, max_size=5))
        found = self.store.lookup("kv", pa.table({"k": pa.array(keys, pa.int64())}), as_of=t)
        assert found.to_pylist() == [{"k": k, "v": expected[k,][0]} for k in keys if (k,) in expected]

    @precondition(lambda self: self.last >= 1)
    @rule(data=st.data())
    def changes(self, data: st.DataObject) -> None:
        after = data.draw(st.sampled_from(self.readable()))
        until = data.draw(st.integers(after, self.last))
        state = dict(self.states[after])
        for row in self.store.changes("kv", after, until).to_pylist():
            if row["_change_type"] in ("delete", "update_preimage"):
                assert state.pop((row["k"],)) == (row["v"],)
            else:
                assert (row["k"],) not in state
                state[row["k"],] = (row["v"],)
        assert state == self.states[until]

    @precondition(lambda self: self.last >= 0)
    @rule()
    def beyond_the_end(self) -> None:
        with pytest.raises(nosync.NotAvailableError):
            self.store.read("kv", as_of=self.last + 1)

    @precondition(lambda self: self.last >= 0)
    @rule(data=st.data(), keep=st.booleans())
    def rewind(self, data: st.DataObject, keep: bool) -> None:
        """Other rows than before may come after it, in the same shards; what was left stays as it was."""
        since = max(self.merged_until, self.store.since())
        t = data.draw(st.integers(min(since, self.last), self.last))
        self.names += 1
        name = f"kept-{self.names}"
        if max(self.pins.values(), default=-1) > t:
            with pytest.raises(nosync.InvalidInputError, match="Take the pin back first"):
                self.store.rewind(t, name if keep else "")
            return
        if keep:
            self.kept[name] = dict(self.states)
        self.store.rewind(t, name if keep else "")
        self.merged_until = since
        self.states = {at: state for at, state in self.states.items() if at <= t}

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), delete=st.booleans())
    def read_what_was_kept(self, data: st.DataObject, delete: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.kept)))
        states = self.kept[name]
        last = max(states)
        assert state_of(self.store.read("kv", branch=name), KEY) == states[last]
        with pytest.raises(nosync.NotAvailableError):
            self.store.read("kv", as_of=last + 1, branch=name)
        if delete:
            self.store.delete_branch(name)
            self.store.node.collect_garbage()
            del self.kept[name]

    @rule()
    def merge(self) -> None:
        self.store.sync()
        self.store.node.merge_once()
        self.store.node.collect_garbage()

    @rule()
    def make_files_ahead(self) -> None:
        FilePool(self.root / "s", self.env).fill()

    @rule()
    def compact(self) -> None:
        self.store.compact()

    @precondition(lambda self: self.last >= 0)
    @rule(data=st.data(), name=st.sampled_from(["a", "b"]))
    def pin(self, data: st.DataObject, name: str) -> None:
        if name in self.pins:
            self.store.unpin(name)
            del self.pins[name]
        else:
            # What a pin can hold is what is kept now: merges may have been lazy, but promise no more.
            t = data.draw(st.integers(max(self.merged_until, self.store.since()), self.last))
            self.store.pin(name, t)
            self.pins[name] = t

    @rule()
    def sync(self) -> None:
        self.store.sync()
        assert self.store.safe_point() == (self.last if self.last >= 0 else None)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()
        assert self.store.safe_point() == (self.last if self.last >= 0 else None)

    @rule(lose_catalog=st.booleans())
    def process_dies(self, lose_catalog: bool) -> None:
        crash(self.store)
        if lose_catalog:
            shutil.rmtree(self.root / "s" / "catalog")
        self.open()
        assert not self.store.missing(), "what was written survives the death of the process"

    @rule(data=st.data())
    def power_fails(self, data: st.DataObject) -> None:
        acked = self.store.safe_point()
        crash(self.store)
        self.env.lose_power(self.root / "s", lambda n: data.draw(st.integers(0, n - 1)))
        self.open()
        safe = self.store.safe_point()
        assert (-1 if acked is None else acked) <= (-1 if safe is None else safe), "acked is durable"
        # What was not acked may be lost, and is named; the machine goes on from the safe point in a new store.
        lost = self.store.last_sealed() != (self.last if self.last >= 0 else None) or bool(self.store.missing())
        unsealed = any(
            int(layer.upper) > (-1 if self.store.last_sealed() is None else self.store.last_sealed() or 0) + 1
            for layer in self.store.layers()
        )
        lost = lost or any(
            self.store.last_sealed(name) != max(states) or self.store.node.missing(name)
            for name, states in self.kept.items()
            if max(states) >= 0
        )
        if lost or unsealed:
            self.check_readable_up_to(-1 if safe is None else safe)
            self.store.close()
            shutil.rmtree(self.root / "s")
            self.states, self.pins, self.kept, self.merged_until = {-1: {}}, {}, {}, 0
            self.open()

    def check_readable_up_to(self, safe: int) -> None:
        for t in [t for t in self.readable() if t <= safe]:
            assert state_of(self.store.read("kv", as_of=t), KEY) == self.states[t]

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "store"):
            assert self.store.verify().ok
            assert not self.store.node.problems


StoreMachine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=30)
TestStoreModel = StoreMachine.TestCase
