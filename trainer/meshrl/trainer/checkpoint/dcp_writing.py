"""Writing DCP checkpoints so that the reason of a failure reaches every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter


class PlainWriter(FileSystemWriter):
    """Raises the operating system's own error where there is one behind what torch says.

    On a full disk torch's archive writer complains about its position in the file, and what is behind that complaint
    is gone once DCP has pickled it for the other ranks.
    """

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """See FileSystemWriter."""
        with _plain():
            return super().write_data(*args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        """See FileSystemWriter."""
        with _plain():
            super().finish(*args, **kwargs)


@contextmanager
def _plain() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        behind = error.__cause__ or error.__context__
        while behind is not None and not isinstance(behind, OSError):
            behind = behind.__cause__ or behind.__context__
        if behind is None:
            raise
        raise OSError(behind.errno, behind.strerror) from error
