"""The `meshrl` command: `root` lists the commands; each is one file in `commands`, loaded when asked for."""

from meshrl.services.cli.root import main

__all__ = ["main"]
