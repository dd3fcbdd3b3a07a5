"""What an object store said, as an error of ours: what was refused, which permission is missing, and what to do.

Invariant
- Nothing of a credential gets into a message: of an answer only its status and its code are told, and of other errors
  one line, without queries of URLs and without what the environment has under the name of a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from nosync.lsm.errors import RemoteError
from nosync.replication.remote.bucket import MissingObjectError, UnavailableError

PUT, GET, LIST, DELETE = "write", "read", "list", "delete"
_PERMISSIONS: Mapping[str, Mapping[str, str]] = {
    "s3": {PUT: "s3:PutObject", GET: "s3:GetObject", LIST: "s3:ListBucket", DELETE: "s3:DeleteObject"},
    "gs": {
        PUT: "storage.objects.create", GET: "storage.objects.get", LIST: "storage.objects.list",
        DELETE: "storage.objects.delete",
    },
    "az": {
        PUT: "blobs/write", GET: "blobs/read", LIST: "blobs/read (list)", DELETE: "blobs/delete",
    },
}  # fmt: skip
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\":\s*\"(\w+)\"")
_QUERY = re.compile(r"\?[^\s\"']+")
_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL|ACCOUNT")
_LEAST_SECRET = 6
_DEBUG = "\n\nDebug source:"
_BAD_CREDENTIALS = (
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed", "InvalidAuthenticationInfo",
)  # fmt: skip
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired")
_NO_CREDENTIALS = ("metadata", "169.254.169.254", "redential")
_NEVER = ("NotSupportedError", "NotImplementedError", "InvalidPathError", "UnknownConfigurationKeyError")
_NOT_ENOUGH = (401, 403)
_LATER = (408, 409, 425, 429)
_SERVER = 500


def scrubbed(text: str) -> str:
    """Returns a text without queries of URLs, and without the secrets of the environment."""
    text = _QUERY.sub("?...", text)
    for name, value in os.environ.items():
        if len(value) >= _LEAST_SECRET and _SECRET_NAME.search(name.upper()):
            text = text.replace(value, "***")
    return text


def mapped(error: Exception, scheme: str, url: str, doing: str, name: str) -> RemoteError:
    """Returns the error of ours for one of obstore's. `doing`: PUT, GET, LIST or DELETE of the object `name`."""
    text = str(error).partition(_DEBUG)[0]
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = next((one for one in found.groups() if one), "") if (found := _CODE.search(text)) else ""
    kind = type(error).__name__
    what = f"{url}: cannot {doing} {name}"
    if "NoSuchBucket" in text or code in ("ContainerNotFound", "NoSuchContainer"):
        return RemoteError(f"{what}: there is no such bucket; make it, or correct the URL")
    if code == "RequestTimeTooSkewed":
        return RemoteError(
            f"{what}: the clock of this host is wrong, says the store ({code}): set it, for requests are dated"
        )
    if code in _EXPIRED:
        return UnavailableError(f"{what}: the credentials have expired ({code}): renew those of the environment")
    if code in _BAD_CREDENTIALS:
        return RemoteError(f"{what}: the credentials of the environment are not accepted ({code})")
    if status in _NOT_ENOUGH or kind in ("PermissionDeniedError", "UnauthenticatedError", "PermissionError"):
        permission = _PERMISSIONS.get(scheme, {}).get(doing, f"to {doing}")
        return RemoteError(f"{what}: the permission {permission} is missing ({code or status or kind})")
    if isinstance(error, FileNotFoundError):
        return MissingObjectError(f"{what}: it is not there")
    if status is not None and (status >= _SERVER or status in _LATER):
        return UnavailableError(f"{what}: the store answers {status}{f' {code}' if code else ''}, which may pass")
    if status is not None:
        return RemoteError(f"{what}: the store answers {status}{f' {code}' if code else ''}")
    line = scrubbed(text.partition("\n")[0])
    if kind in _NEVER:
        return RemoteError(f"{what}: it cannot be done there ({kind}): {line}")
    if any(word in text for word in _NO_CREDENTIALS):
        return RemoteError(f"{what}: no credentials were found in the environment: {line}")
    return UnavailableError(f"{what}: it cannot be reached: {line}")
