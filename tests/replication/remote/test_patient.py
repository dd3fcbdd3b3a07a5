"""What is not answered to who reads is asked again, and what changes objects is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nosync.lsm.platform.env import Env
from nosync.replication.remote.bucket import MissingObjectError, UnavailableError
from nosync.replication.remote.patient import PatientBucket
from nosync.testing.simulated_bucket import Fault, Objects, SimulatedBucket


class Unhurried(Env):
    """Waits for nothing, and counts that."""

    waited_s = 0.0

    def wait_s(self, seconds: float) -> None:
        self.waited_s += seconds


@pytest.mark.parametrize("failures", [0, 1, 5, 6])
@pytest.mark.parametrize(
    "read",
    [
        lambda bucket: bucket.get("d/a"), lambda bucket: bucket.get_range("d/a", 0, 1),
        lambda bucket: bucket.get_end("d/a", 1), lambda bucket: bucket.list("d/"),
        lambda bucket: bucket.directories("d/"),
    ],
)  # fmt: skip
def test_reads_are_asked_again_for_a_while(read: Callable[[PatientBucket], object], failures: int) -> None:
    objects, left = Objects(), failures
    SimulatedBucket(objects).put_new("d/a", b"x")

    def fault(call: str, name: str) -> Fault:
        nonlocal left
        left -= 1
        return "before" if left >= 0 else ""

    env = Unhurried()
    bucket = PatientBucket(SimulatedBucket(objects, fault), env)
    if failures > 5:
        with pytest.raises(UnavailableError):
            read(bucket)
    else:
        assert read(bucket) is not None
    assert env.waited_s == pytest.approx(sum(0.2 * 2**n for n in range(min(failures, 5))))


def test_what_changes_objects_is_asked_once() -> None:
    objects = Objects()
    bucket = PatientBucket(SimulatedBucket(objects, lambda call, name: "after"), Unhurried())
    with pytest.raises(UnavailableError):
        bucket.put_new("a", b"x")
    with pytest.raises(UnavailableError):
        bucket.delete(["a"])
    assert (objects.calls["put"], objects.calls["delete"]) == (1, 1)


def test_what_is_not_there_is_not_waited_for() -> None:
    env = Unhurried()
    with pytest.raises(MissingObjectError):
        PatientBucket(SimulatedBucket(), env).get("a")
    assert env.waited_s == 0


def test_a_store_that_says_nothing_is_given_up_soon() -> None:
    class Clock(Unhurried):
        now_s = 0.0

        def monotonic_s(self) -> float:
            return self.now_s

    clock, objects = Clock(), Objects()

    def silent(call: str, name: str) -> Fault:
        clock.now_s += 10.0
        return "before"

    with pytest.raises(UnavailableError):
        PatientBucket(SimulatedBucket(objects, silent), clock).get("a")
    assert objects.calls["get"] == 3
