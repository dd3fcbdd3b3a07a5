"""The command line. Commands that say something have `--json`; errors are one line, never a stack trace."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence

import click

from nosync.cli import (
    checkpoint,
    checkpoint_door,
    daemon,
    demo,
    export,
    inspect,
    jobs,
    maintain,
    remote,
    run,
    sql,
    status,
)
from nosync.cli.app import cli
from nosync.cli.console import fail, log_to_stderr
from nosync.lsm.errors import CorruptionError, NosyncError
from nosync.lsm.platform.layout import MANIFESTS
from nosync.lsm.visible import visible

__all__ = [
    "checkpoint",
    "checkpoint_door",
    "cli",
    "daemon",
    "demo",
    "export",
    "inspect",
    "jobs",
    "main",
    "maintain",
    "remote",
    "run",
    "sql",
    "status",
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command `nosync`."""
    log_to_stderr(logging.ERROR, "%(message)s")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # where the locale has no letter for what is in a store
            stream.reconfigure(errors="backslashreplace")
    try:
        cli.main(args=None if arguments is None else list(arguments), prog_name="nosync", standalone_mode=False)
    except NosyncError as error:
        fail(f"{error}{_what_to_do(error)}", 1)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        click.echo(visible(said.getvalue(), keep="\n\t"), err=True, nl=False)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", 130)
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go, and Python would say so at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(f"{error.filename or 'the output'}: {error.strerror or error}", 1)


def _what_to_do(error: NosyncError) -> str:
    """Returns what to add to an error of a command that only reads: it may not set a damaged manifest aside."""
    if not isinstance(error, CorruptionError) or f"/{MANIFESTS}/" not in str(error):
        return ""
    return "; opened for writing (a job, or `nosync compact STORE`), the store sets it aside, and `nosync status` says what then"
