"""A learned reward model on a stock vLLM pooling server: `vllm serve MODEL --runner pooling`.

The conversation goes to `POST /classify` as messages, so the server's chat template applies; the score is the raw
output of one class (`use_activation: false`), the first by default, which is the reward of models with one.
https://docs.vllm.ai/en/stable/models/pooling_models/classify/
"""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeInt

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Json, Sample
from meshrl.rewardd.judges._remote import RemoteJudge, RemoteJudgeConfig, conversation


class Config(RemoteJudgeConfig):
    """`url` is the server's root."""

    model: str
    """The name that the server serves it under."""
    class_index: NonNegativeInt = 0
    """Index of the output that is the score."""
    use_activation: bool = False
    """True: a probability instead of the raw output."""


class PoolingJudge(RemoteJudge):
    """Asks a learned reward model."""

    def __init__(self, config: Config) -> None:
        super().__init__("pooling", config)
        self._config = config

    async def _ask(self, sample: Sample) -> Json:
        config = self._config
        answer: Any = await self.post(
            "/classify",
            {
                "model": config.model,
                "messages": conversation(sample),
                "use_activation": config.use_activation,
                "add_generation_prompt": False,
            },
        )
        try:
            outputs = answer["data"][0]["probs"]
            return outputs[config.class_index]
        except (KeyError, IndexError, TypeError) as error:
            raise CorruptError(
                f"the pooling judge: no data[0].probs[{config.class_index}] in {str(answer)[:200]}"
            ) from error


def build(config: Config) -> PoolingJudge:
    """The judge, not connected yet."""
    return PoolingJudge(config)
