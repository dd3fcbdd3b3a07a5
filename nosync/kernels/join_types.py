"""The types of joins, and what each of them keeps. Light, for commands that only look at a flow."""

from __future__ import annotations

from dataclasses import dataclass

INNER, LEFT, RIGHT, FULL, SEMI, ANTI = "inner", "left", "right", "full", "left_semi", "left_anti"
_SPELLINGS = {
    INNER: "inner",
    LEFT: "left leftouter left_outer",
    RIGHT: "right rightouter right_outer",
    FULL: "full fullouter full_outer outer",
    SEMI: "left_semi leftsemi semi",
    ANTI: "left_anti leftanti anti",
}
JOIN_TYPES = {word: how for how, words in _SPELLINGS.items() for word in words.split()}
"""The types of joins by every name that Spark has for them."""


@dataclass(frozen=True)
class JoinSpec:
    """The columns that are equal, and which rows are kept: `how` is one of the values of `JOIN_TYPES`."""

    on: tuple[str, ...]
    how: str

    @property
    def keeps_left(self) -> bool:
        """Returns whether rows of the left side without a match stay."""
        return self.how in (LEFT, FULL)

    @property
    def keeps_right(self) -> bool:
        """Returns whether rows of the right side without a match stay."""
        return self.how in (RIGHT, FULL)

    @property
    def is_one_sided(self) -> bool:
        """Returns whether it gives rows of the left side alone: a semi or an anti join."""
        return self.how in (SEMI, ANTI)

    @property
    def needs_null_keys(self) -> tuple[bool, bool]:
        """Returns of each side whether rows with a null key, which match nothing, can be in the result."""
        return self.how in (LEFT, FULL, ANTI), self.how in (RIGHT, FULL)

    @property
    def only_grows(self) -> bool:
        """Returns whether more rows never take away others."""
        return self.how in (INNER, SEMI)
