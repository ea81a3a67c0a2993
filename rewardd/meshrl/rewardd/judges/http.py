"""Your own judge behind HTTP: one POST of JSON per sample, the answer is a score.

POST url  {"uid", "data_source", "solution_str", "ground_truth", "extra_info", "messages"}
200       a number, {"score": …, further numbers, "token_rewards": […]} or {"fault": "why no score"}
"""

from __future__ import annotations

from typing import Any

from meshrl.contract.errors import InfraError
from meshrl.contract.types import Json, Sample
from meshrl.rewardd.judges._remote import RemoteJudge, RemoteJudgeConfig


class Config(RemoteJudgeConfig):
    """Requests go to `url` as it is."""

    version: str = ""
    """Part of the reward hash: change it when the remote program changes."""


class HttpJudge(RemoteJudge):
    """Asks your own judge."""

    async def _ask(self, sample: Sample) -> Json:
        answer: Any = await self.post(
            "",
            {
                "uid": str(sample.uid),
                "data_source": sample.data_source,
                "solution_str": sample.solution,
                "ground_truth": sample.ground_truth,
                "extra_info": dict(sample.extra_info),
                "messages": [{"role": m.role, "content": m.content} for m in sample.messages],
            },
        )
        if isinstance(answer, dict) and "fault" in answer:
            raise InfraError(f"the http judge answered: {str(answer['fault'])[:500]}")
        return answer


def build(config: Config) -> HttpJudge:
    """The judge, not connected yet."""
    return HttpJudge("http", config)
