"""The `meshrl` command: `root` lists the commands; each is one file in `commands`, loaded when asked for."""

from meshrl.cli.root import main

__all__ = ["main"]
