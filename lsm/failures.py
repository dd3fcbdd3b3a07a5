"""Errors across the process boundary: Spark carries a task's exception to the driver as text only."""

from __future__ import annotations

import base64
import json
import re

from nosync.lsm import errors
from nosync.lsm.errors import NosyncError

_MARK = re.compile(r"nosync-failure:([A-Za-z0-9+/=]+):end")


def encode_failure(error: NosyncError) -> str:
    """A text that `decode_failure` finds inside whatever Spark wraps around it."""
    fields = {name: value for name, value in vars(error).items() if isinstance(value, str)}
    text = json.dumps({"kind": type(error).__name__, "message": str(error), "fields": fields})
    return f"{error}\nnosync-failure:{base64.b64encode(text.encode()).decode()}:end"


def decode_failure(text: str) -> NosyncError | None:
    """The error that a task raised, or None where the text holds none."""
    found = _MARK.search(text)
    if found is None:
        return None
    failure = json.loads(base64.b64decode(found[1]))
    kind: type[NosyncError] = getattr(errors, failure["kind"], NosyncError)
    return kind(failure["message"], **failure["fields"])
