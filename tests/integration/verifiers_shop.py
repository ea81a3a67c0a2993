"""A taskset of verifiers with a tool server of each task's own: a shop that sells what a task asks for."""

import asyncio
import os
from pathlib import Path

import verifiers.v1 as vf


class ShopTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """One tool. It does not start where the variable SHOP_CATALOGUE names a file that there is not."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        """Read the catalogue."""
        if name := os.environ.get("SHOP_CATALOGUE"):
            await asyncio.to_thread(Path(name).read_text)

    @vf.tool
    async def price(self, thing: str) -> str:
        """The price of a thing."""
        return str(len(thing))


class ShopTask(vf.Task[vf.TaskData]):
    """A purchase."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """The shop's."""
        return [ShopTools(vf.ToolsetConfig())]

    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        """How often the policy spoke."""
        return float(trace.num_turns)


class Shop(vf.Taskset[ShopTask, vf.TasksetConfig]):
    """Two purchases."""

    def load(self) -> list[ShopTask]:
        """In order."""
        return [
            ShopTask(vf.TaskData(name=thing, prompt=f"Buy {thing}."), self.config.task)
            for thing in ("tea", "milk")
        ]


__all__ = ["Shop"]

if __name__ == "__main__":
    ShopTools.run()
