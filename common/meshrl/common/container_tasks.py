"""A task that is worked on in a container, as a row of data carries it in `extra_info.container`.

Readers of data make it (`meshrl.trainer.data.readers.harbor`, `swe`), the program `container` plays it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from meshrl.common.config import Config, Environment

KEY = "container"
"""Its key in `extra_info`."""


def absolute_path(path: str) -> str:
    """The path as it is; empty is allowed. Raises ValueError."""
    if path and (not path.startswith("/") or ".." in path.split("/") or "\0" in path):
        raise ValueError(f"{path!r:.60}, want an absolute path")
    return path


def path_below_root(path: str) -> str:
    """The path as it is. Raises ValueError."""
    if not absolute_path(path).strip("/."):
        raise ValueError(f"{path!r:.60}, want an absolute path below /")
    return path


AbsolutePath = Annotated[str, AfterValidator(absolute_path)]
PathBelowRoot = Annotated[str, AfterValidator(path_below_root)]


class ContainerTask(Config):
    """Paths of this machine are absolute; the worker that samples the row reads them."""

    name: str
    """For people."""
    image: str = ""
    """A name of a registry, or of an unpacked root or its tarball; empty: it is built from `build`."""
    build: str = ""
    """A folder with a Dockerfile."""
    workdir: AbsolutePath = ""
    """The folder in which the agent's shell and the tests begin; empty: the Dockerfile's WORKDIR, else /."""
    unpack: dict[PathBelowRoot, str] = Field(default_factory=dict)
    """Tarballs of this machine by the folder of the container that each is unpacked in, before the agent begins."""
    variables: Environment = Field(default_factory=dict)
    """Environment of the agent's shell and of the tests."""
    cpus: PositiveFloat | None = None
    memory_bytes: PositiveInt | None = None
    disk_bytes: PositiveInt | None = None
    agent_s: PositiveFloat | None = None
    """Seconds from the agent's first command to its last; None: the row's deadline alone counts."""
    tests: str = ""
    """A folder with `test.sh`, which becomes /tests when the agent has ended."""
    test_files: dict[str, str] = Field(default_factory=dict)
    """Texts of such a folder by their names, in place of `tests`."""
    tests_s: PositiveFloat = 600.0
    """Seconds that the tests may take."""
    test_variables: Environment = Field(default_factory=dict)
    """Environment of the tests alone."""
    separate: bool = False
    """The tests run in a new container, which gets nothing but `artifacts` of the agent's."""
    tests_build: str = ""
    """A folder with that container's own Dockerfile; empty: it is as the agent's was."""
    artifacts: list[PathBelowRoot] = Field(default_factory=list)
    kept: list[PathBelowRoot] = Field(default_factory=list)
    """Paths below them that the new container has as its image does, whatever the agent did."""
