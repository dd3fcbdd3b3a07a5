"""URLs, and what an object store's answers become. No credential is ever said."""

from __future__ import annotations

import logging
import socket
import sys
import time
from pathlib import Path

import pytest

from nosync.lsm.errors import InvalidInputError, NosyncError, RemoteError
from nosync.replication.remote import cloud
from nosync.replication.remote.bucket import Bucket, MissingObjectError, UnavailableError
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.cloud_errors import mapped
from nosync.replication.remote.url import RemoteUrl, is_remote_url, parse_url
from tests.helpers.s3 import KEY, SECRET, answering


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", RemoteUrl("s3", "bucket", "")), ("s3://bucket/", RemoteUrl("s3", "bucket", "")),
        ("s3://bucket/pre/fix/", RemoteUrl("s3", "bucket", "pre/fix")), ("S3://b.c-d/x", RemoteUrl("s3", "b.c-d", "x")),
        ("gs://bucket/a", RemoteUrl("gs", "bucket", "a")), ("az://container/a", RemoteUrl("az", "container", "a")),
        ("file:///mnt/copies", RemoteUrl("file", "", "mnt/copies")), ("memory://m", RemoteUrl("memory", "m", "")),
    ],
)  # fmt: skip
def test_a_url(text: str, expected: RemoteUrl) -> None:
    assert parse_url(text) == expected
    assert parse_url(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ftp://host/x", "scheme ftp"), ("s3a://bucket/x", "write s3://"), ("bucket/x", "not the URL"), ("", "not the URL"),
        ("s3:///x", "no name of a bucket"), ("s3://bu cket/x", "no name of a bucket"), ("s3://bucket/../x", "'..'"),
        ("s3://bucket/a\n/x", "not the URL"), ("s3://bucket/a;b/x", "prefix"),
        ("file://host/x", "absolute path"), ("file:///", "absolute path"),
        ("host:7500", "not the URL"),
    ],
)  # fmt: skip
def test_what_is_no_url(text: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        parse_url(text)


@pytest.mark.parametrize("text", [f"s3://{KEY}:{SECRET}@bucket/x", f"s3://bucket/x?sig={KEY}", f"az://c/x#{KEY}"])
def test_credentials_in_a_url_are_refused_and_not_said(text: str) -> None:
    with pytest.raises(InvalidInputError, match="leave them out") as caught:
        parse_url(text)
    assert KEY not in str(caught.value)
    assert SECRET.partition("/")[0] not in str(caught.value)


def test_what_looks_like_a_url() -> None:
    assert all(map(is_remote_url, ("s3://b", "file:///x", "ftp://x")))
    assert not any(map(is_remote_url, ("state/", "host:7500", "/a/b", "", 7)))


CALLS = {
    "PUT": lambda bucket: bucket.put_new("a", b"x"),
    "GET": lambda bucket: bucket.get("a"),
    "DELETE": lambda bucket: bucket.delete(["a"]),
    "POST": lambda bucket: bucket.delete(["a"]),
}


def errors_of(bucket: Bucket) -> list[NosyncError]:
    found = []
    for call in (CALLS["PUT"], CALLS["GET"], CALLS["DELETE"], lambda bucket: bucket.list("a/")):
        with pytest.raises(NosyncError) as caught:
            call(bucket)
        found.append(caught.value)
    return found


def test_each_missing_permission_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(monkeypatch, lambda method: (403, "AccessDenied")) as url:
        said = [str(error) for error in errors_of(open_bucket(url))]
    for text, permission in zip(
        said, ("s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket"), strict=True
    ):
        assert f"the permission {permission} is missing (AccessDenied)" in text
        assert text.startswith("s3://copies: cannot ")


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        ((404, "NoSuchBucket"), RemoteError, "there is no such bucket"),
        ((403, "InvalidAccessKeyId"), RemoteError, "are not accepted"),
        ((403, "SignatureDoesNotMatch"), RemoteError, "are not accepted"),
        ((403, "RequestTimeTooSkewed"), RemoteError, "the clock of this host is wrong"),
        ((400, "ExpiredToken"), UnavailableError, "have expired"),
        ((503, "SlowDown"), UnavailableError, "answers 503 SlowDown"),
        ((500, "InternalError"), UnavailableError, "answers 500"),
        ((429, "TooManyRequests"), UnavailableError, "answers 429"),
        ((400, "EntityTooLarge"), RemoteError, "answers 400 EntityTooLarge"),
    ],
)  # fmt: skip
def test_what_a_store_answers(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str], kind: type[NosyncError], why: str
) -> None:
    with answering(monkeypatch, lambda method: answer) as url:
        for error in errors_of(open_bucket(url)):
            assert type(error) is kind
            assert why in str(error)


def test_a_store_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with answering(monkeypatch, lambda method: None) as url:
        bucket = open_bucket(url)
    for error in errors_of(bucket):
        assert type(error) is UnavailableError
        assert "cannot be reached" in str(error)
        assert len(str(error).splitlines()) == 1
        assert KEY not in f"{error}{caplog.text}"
        assert SECRET not in f"{error}{caplog.text}"


def test_who_reads_does_not_wait_long_for_a_store_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "SILENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        started_s = time.monotonic()
        with pytest.raises(UnavailableError, match="cannot be reached"):
            open_bucket("s3://bucket/x", to_read=True).get("a")
        assert time.monotonic() - started_s < cloud.REQUEST_TIMEOUT_S / 4


def test_a_profile_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match="AWS_PROFILE is 'nobody', and gives no credentials"):
        open_bucket("s3://copies/x")


def test_what_a_library_does_not_do_is_not_tried_again() -> None:
    from obstore.exceptions import NotSupportedError

    error = mapped(NotSupportedError("no such thing"), "az", "az://b", "read", "a")
    assert type(error) is RemoteError
    assert "it cannot be done there (NotSupportedError): no such thing" in str(error)


def test_a_bucket_that_is_not_there(s3: str) -> None:
    bucket = open_bucket("s3://nowhere-at-all/x")
    for error in errors_of(bucket)[:2]:
        assert "there is no such bucket" in str(error)
        assert not isinstance(error, MissingObjectError)


def test_the_secrets_of_the_environment_are_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    from nosync.replication.remote.cloud_errors import mapped, scrubbed

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2026&sig=abcdef")
    text = f"error sending request for https://x.blob/c?sig=abcdef with {SECRET} and sv=2026&sig=abcdef"
    for said in (scrubbed(text), str(mapped(ValueError(text), "az", "az://c", "write", "a"))):
        assert SECRET not in said
        assert "abcdef" not in said


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(RemoteError, match=r"pip install 'nosync\[remote\]'"):
        open_bucket("s3://bucket/x")
