"""The Codex CLI as it is, on a session of the gateway, where it is installed (npm install -g @openai/codex)."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from meshrl.cli.demo.tiny_model import PLAIN
from meshrl.contract.types import (
    AdamStep,
    CreateModel,
    GenerateDelta,
    GenerateRequest,
    Pass,
    TrainingExample,
    Trajectory,
)
from meshrl.rollout.tokenizer import load_tokenizer
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.hosted.workbench import PolicyBench
from meshrl.trainer.ranks.world import World
from tests.doubles.scripted import Scripted

from ..chat_model import write_chat_model
from . import gateway_mesh
from .gateway_mesh import agents_mesh

CODEX = shutil.which("codex")
PROVIDER = """\
model = "policy"
model_provider = "mesh"
[model_providers.mesh]
name = "mesh"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
RUN = f"""\
cat > $CODEX_HOME/config.toml <<END
{PROVIDER}END
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "count the lines" < /dev/null
"""
"""The command of an agent, as docs/how-to/codex-and-anthropic.md has it."""


def call(command: str) -> str:
    arguments = {"cmd": command, "yield_time_ms": 30_000, "login": False}
    called = json.dumps({"name": "exec_command", "arguments": arguments})
    return f"<tool_call>{called}</tool_call>"


LEAST = {
    **PLAIN,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "max_position_embeddings": 1 << 17,
}
"""40,000 characters are as many tokens."""


class Judged(Scripted):
    """The log-probs of its tokens are a model's."""

    def __init__(self, model: Path, said: Sequence[str]) -> None:
        super().__init__(load_tokenizer(model), said)
        self._model = AutoModelForCausalLM.from_pretrained(model)
        self._cache, self._read = DynamicCache(), 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        async for delta in super().generate(request):
            ids = [*request.prompt_ids.tolist(), *delta.tokens.tolist()]
            yield replace(delta, logprobs=self._judged(ids, len(delta.tokens)))

    @torch.no_grad()
    def _judged(self, ids: Sequence[int], count: int) -> np.ndarray[Any, Any]:
        """Log-probs of the last `count` tokens; the model has the earlier ones in its cache."""
        new = torch.tensor([ids[self._read :]])
        self._read = len(ids)
        logits = self._model(new, past_key_values=self._cache).logits[0, -1 - count : -1]
        own = logits.log_softmax(-1).gather(-1, new[0, -count:, None])
        found: np.ndarray[Any, Any] = own[:, 0].numpy()
        return found


def trained(model: Path, row: Trajectory) -> tuple[np.ndarray[Any, Any], float]:
    """Log-probs of its sampled tokens as the trainer computes them, and the norm of the gradient of a step."""
    world = World.start("cpu")
    policy = PolicyBench(ModelConfig(path=model), world).create(CreateModel(base_model=""))
    inputs: dict[str, Any] = {
        "target_tokens": row.tokens[1:].astype(np.int64),
        "logprobs": row.rollout_logprobs[1:],
        "advantages": row.loss_mask[1:].astype(np.float32),
    }
    example = TrainingExample(tokens=row.tokens[:-1], loss_inputs=inputs)
    passed = policy.forward_backward(Pass(examples=[example], loss="ppo"))
    norm = policy.step(AdamStep(learning_rate=1e-3)).metrics["grad_norm"]
    world.close()
    return passed.outputs[0]["logprobs"][row.loss_mask[1:] == 1], norm


@pytest.mark.skipif(CODEX is None, reason="codex is not installed")
async def test_an_episode_of_codex_with_five_tool_calls_is_one_row_with_a_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first request has 40 kB. The policy plays a part: a model that can use Codex is no tiny one."""
    said = [call("ls"), call("echo 1 > a"), call("cat a"), call("echo 2 >> a"), call("wc -l a")]
    monkeypatch.setattr(gateway_mesh, "MAX_BODY", 4 << 20)
    places = {name: tmp_path / name for name in ("work", "home")}
    for place in places.values():
        place.mkdir()
    options = {
        "command": ["bash", "-c", RUN],
        "cwd": str(places["work"]),
        "env": {"CODEX_HOME": str(places["home"])},
        "tools_unseen": True,
    }
    model = tmp_path / "model"
    write_chat_model(model, head_dim=16, kind=LEAST)
    engine = Judged(model, [*said, "done"])
    async with agents_mesh(
        model,
        options,
        engine=engine,
        prompt_tokens=None,
        sampling={"max_tokens": 200_000},
        deadline_s=120.0,
    ) as mesh:
        ((_, row),) = (await mesh.rows(1)).items()
    told = mesh.tokenizer.decode_all(row.tokens.tolist())
    assert all(f"A:{text}" in told for text in [*said, "done"])
    assert len(engine.requests) == 6 and int(row.loss_mask.sum()) == engine.sampled
    assert (places["work"] / "a").read_text() == "1\n2\n"
    logprobs, norm = trained(model, row)
    np.testing.assert_allclose(logprobs, row.rollout_logprobs[row.loss_mask == 1], atol=1e-4)
    assert norm > 0
