"""Object stores on loopback: one that keeps things, and one that gives the same answer to everything."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

KEY, SECRET = "AKIAEXAMPLEEXAMPLE12", "SeCrEtSeCrEtSeCrEtSeCrEt/42"
BUCKET = "copies"


def environment(port: int) -> dict[str, str]:
    """Returns the variables by which a client finds the store."""
    return {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip


@contextlib.contextmanager
def moto(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs moto's S3 with an empty bucket in it, and gives its URL."""
    import logging

    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        for name, value in environment(port).items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        server.stop()


Answer = tuple[int, str]


@contextlib.contextmanager
def answering(patch: pytest.MonkeyPatch, answer: Callable[[str], Answer | None]) -> Iterator[str]:
    """Runs a server that answers each request by its method: a status, and the code of an S3 error. None: 200."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = answer(self.command)
            body = b"" if found is None else f"<Error><Code>{found[1]}</Code></Error>".encode()
            self.send_response(200 if found is None else found[0])
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"x"')
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_DELETE = do_POST = do_HEAD = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        for name, value in environment(server.server_port).items():
            patch.setenv(name, value)
        yield f"s3://{BUCKET}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
