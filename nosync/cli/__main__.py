"""`python -m nosync.cli`."""

from nosync.cli import main

main()
