"""The command `nosync` itself; its commands are in the modules beside this one."""

from __future__ import annotations

import errno
import re
from typing import Any

import click

_NEGATIVE = re.compile(r"-\d+\Z")


class Command(click.Command):
    """A command whose arguments may be negative numbers, such as the epoch -1, which Click takes for options.

    They are put last, behind `--`: a number is the last argument of each command that takes one.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_value = {
            name for p in self.params if isinstance(p, click.Option) and not (p.is_flag or p.count) for name in p.opts
        }
        found = [
            i for i, text in enumerate(args) if _NEGATIVE.match(text) and (i == 0 or args[i - 1] not in takes_value)
        ]
        if found and "--" not in args:
            args = [*(text for i, text in enumerate(args) if i not in found), "--", *(args[i] for i in found)]
        return super().parse_args(ctx, args)


class Group(click.Group):
    """Holds the commands of `nosync`."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command. Where a reader such as `head` has seen enough, Click would end with 1: `main` ends with 0."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            raise BrokenPipeError from None  # without a number, by which Click knows it


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="nosync")
def cli() -> None:
    """nosync: a coordination-free state store for streaming computations on Spark.

    A store is a directory. Every stage of a computation records what it changed at each epoch as an immutable
    layer; any epoch can be read again, and what is lost is recomputed.

    \b
    Start here:
      nosync demo                               a year of flights, damaged and recovered, in about two minutes
      nosync status  nosync-demo/store          what is in a store, and how safe it is
      nosync get     nosync-demo/store delays --as-of 26
    """
