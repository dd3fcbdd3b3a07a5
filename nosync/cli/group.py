"""The command `nosync` itself; its commands are in the modules beside this one."""

from __future__ import annotations

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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
