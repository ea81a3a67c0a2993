from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from meshrl.contract.errors import InfraError
from meshrl.contract.types import Version
from meshrl.rollout.server_engine.checkpoint import ADAPTER_FILE
from meshrl.rollout.server_engine.kind import ServedAdapters
from meshrl.rollout.server_engine.response import Chunk


class Server:
    """State of a server with adapters."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.stamped = "default"

    async def load_adapter(self, name: str, directory: Path) -> None:
        assert name not in self.loaded
        self.loaded.append(name)

    async def unload_adapter(self, name: str) -> None:
        self.loaded.remove(name)

    async def set_label(self, version: Version) -> None:
        self.stamped = str(version)

    async def label(self) -> str:
        return self.stamped

    async def answer(self, *tokens: int) -> AsyncGenerator[Chunk, None]:
        """A token a chunk; the last has a span for each label that was stamped meanwhile."""
        spans: list[tuple[str, int, int]] = []
        for number, token in enumerate(tokens):
            spans.append((self.stamped, number, number + 1))
            last = number == len(tokens) - 1
            yield Chunk(
                tokens=[token],
                logprobs=[-1.0],
                finish_reason="length" if last else "",
                spans=spans if last else None,
            )


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / ADAPTER_FILE).write_text("{}")
    return tmp_path


async def test_a_response_keeps_its_adapter_which_stays_loaded_as_long_as_it_runs(
    adapter: Path,
) -> None:
    server = Server()
    served = ServedAdapters(server)
    await served.load(adapter, Version(1, 1))
    first = served.newest
    running = served.labelled(first, server.answer(7, 8, 9))
    await anext(running)
    for step in (2, 3):  # the second is nobody's
        await served.load(adapter, Version(1, step))
        await anext(running) if step == 2 else None
    assert server.loaded == [first, served.newest]
    last = await anext(running)
    assert last.spans == [("1.1", 0, 3)]
    await running.aclose()
    assert server.loaded == [served.newest]


async def test_tokens_of_weights_that_others_labelled_keep_those_labels(adapter: Path) -> None:
    server = Server()
    served = ServedAdapters(server)
    await served.load(adapter, Version(1, 1))
    server.stamped = "theirs"
    chunks = [chunk async for chunk in served.labelled(served.newest, server.answer(7))]
    assert chunks[-1].spans == [("theirs", 0, 1)]


async def test_a_server_that_keeps_its_label_serves_no_adapter(adapter: Path) -> None:
    class Deaf(Server):
        async def set_label(self, version: Version) -> None: ...

    served = ServedAdapters(Deaf())
    with pytest.raises(InfraError, match=r"its weights are 'default', not 1\.1"):
        await served.load(adapter, Version(1, 1))
    assert served.newest == ""


async def test_without_an_adapter_the_base_model_answers(tmp_path: Path) -> None:
    server = Server()
    served = ServedAdapters(server)
    await served.load(tmp_path, Version(0, 0))
    assert (served.newest, server.loaded, server.stamped) == ("", [], "0.0")
