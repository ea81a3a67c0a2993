"""The `meshrl` command: `root` lists the commands; each is one file in `commands`, loaded when asked for."""

from meshrl.common.python_process import start_again


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code."""
    if arguments is None:  # it is a process of its own
        start_again("meshrl.cli")
    from meshrl.cli.root import main as run

    run(arguments)
