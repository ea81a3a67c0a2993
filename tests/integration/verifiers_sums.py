"""A taskset of verifiers as its user writes one: sums, each rewarded for a reply of any length."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """A sum's answer."""

    answer: str = ""


class SumTask(vf.Task[SumData]):
    """One sum."""

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        """1 for the answer alone."""
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def said(self, trace: vf.Trace) -> float:
        """1 for anything."""
        return float(bool(trace.last_reply))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Ten of them."""

    def load(self) -> list[SumTask]:
        """In order."""
        return [
            SumTask(SumData(name=f"sum{i}", prompt=f"{i}+1?", answer=str(i + 1)), self.config.task)
            for i in range(10)
        ]


__all__ = ["Sums"]
