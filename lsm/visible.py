"""One filter for all that is shown: terminals, tables, error lines, pages and notebooks.

Names, values and messages come from files and nodes of others. A terminal obeys what is in them: ESC and C1 controls move the
cursor, set the title, or answer as if the user had typed; a carriage return writes over a line; bidirectional marks and
characters without a width make one name look like another one. So they are shown as Python writes them, such as
\\x1b, and do nothing.
"""

from __future__ import annotations

import unicodedata

_ACTING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Controls, format characters (marks of direction, no width), halves of a surrogate pair, and separators of lines."""


def visible(text: str, keep: str = "") -> str:
    """Returns the text with everything escaped that acts instead of being seen. `keep`: what may act, such as line
    breaks.
    """
    if text.isprintable():
        return text
    return "".join(_shown(c) if c not in keep and unicodedata.category(c) in _ACTING else c for c in text)


def _shown(character: str) -> str:
    return character.encode("unicode_escape").decode()
