"""Logical time.

Invariants
- A timestamp is `(epoch, round)`, ordered lexicographically; it never comes from a clock.
- It is packed into one non-negative int64, `epoch << ROUND_BITS | round`, so that order is kept and a
  half-open interval of timestamps is a half-open interval of integers.
- `round` is 0 outside loops: epoch `t` covers `[pack(t), pack(t + 1))`.
"""

from __future__ import annotations

from typing import NewType, SupportsIndex

from nosync.lsm.errors import InvalidInputError

Epoch = NewType("Epoch", int)
"""Number of one complete batch of input, counted by the caller from any start >= 0."""
Time = NewType("Time", int)
"""A packed `(epoch, round)`."""

ROUND_BITS = 20
_MOST_DIGITS = 19  # of a number that fits 64 bits
MAX_ROUND = (1 << ROUND_BITS) - 1
MAX_EPOCH = (1 << (63 - ROUND_BITS)) - 2
ZERO = Time(0)
END_OF_TIME = Time((1 << 63) - 1)


def pack(epoch: int, round: int = 0) -> Time:
    """Returns the packed time of `(epoch, round)`. Raises InvalidInputError outside the ranges."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= MAX_EPOCH:
        advice = "; give int(...) of it" if isinstance(epoch, SupportsIndex) and not isinstance(epoch, int) else ""
        raise InvalidInputError(
            f"timestamp {epoch!r} is not an epoch number: expected an integer in 0..{MAX_EPOCH}{advice}"
        )
    if not 0 <= round <= MAX_ROUND:
        raise InvalidInputError(f"round {round!r} of epoch {epoch} is not in 0..{MAX_ROUND}")
    return Time(epoch << ROUND_BITS | round)


def epoch_of(time: Time) -> Epoch:
    return Epoch(time >> ROUND_BITS)


def round_of(time: Time) -> int:
    return time & MAX_ROUND


def end_of(epoch: int) -> Time:
    """Returns the first time after `epoch`: the `upper` of a layer that covers just that epoch."""
    return pack(epoch + 1)


def last_of(epoch: int) -> Time:
    """Returns the last time inside `epoch`, rounds included: what a read as of `epoch` may see."""
    return Time(end_of(epoch) - 1)


def show(time: Time) -> str:
    """`7` or, inside a loop, `7.3`."""
    return f"{epoch_of(time)}.{round_of(time)}" if round_of(time) else str(epoch_of(time))


def show_as_of(time: Time) -> str:
    """Returns what `show` returns, but the end of an epoch is just that epoch: so reads as of an epoch are worded."""
    return str(epoch_of(time)) if round_of(time) == MAX_ROUND else show(time)


def is_number(text: str) -> bool:
    """Returns whether a text is a number as nosync writes it, without zeros before it. `isdigit` alone takes superscripts,
    which `int` does not.
    """
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and (text[0] != "0" or text == "0")


def parse(text: str) -> Time:
    """Returns the inverse of `show`. Raises ValueError for other text."""
    epoch, _, round = text.partition(".")
    if not (is_number(epoch) and (not round or is_number(round))):
        raise ValueError(f"not a timestamp: {text!r}")
    time = pack(int(epoch), int(round or 0))
    if show(time) != text:
        raise ValueError(f"not a timestamp in its one spelling: {text!r}")
    return time
