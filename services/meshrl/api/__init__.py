"""Train from Python, and read what runs left: `from meshrl.api import open_run, run`.

`meshrl` itself can hold no names: it is a namespace, whose portions lie in several folders.
"""

from meshrl.api.run import Run, RunStatus, open_run, run

__all__ = ["Run", "RunStatus", "open_run", "run"]
