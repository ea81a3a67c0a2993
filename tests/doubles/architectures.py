"""Tries architectures of transformers, each as a tiny random model, and writes down what came out.

python -m tests.doubles.architectures [NAME ...] [--write docs/reference/models.md]

random weights ─▶ checkpoint ─▶ packed log-probs and gradients, beside transformers' own of each row ─▶ one step of
AdamW ─▶ published weights ─▶ the embedded engine's log-probs, beside the policy's
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch.multiprocessing.spawn import spawn

from meshrl.contract.errors import MeshError
from meshrl.contract.types import GenerateRequest, Int32, OnUpdate, SamplingParams, Version
from meshrl.rollout.config import TORCH_ARCHITECTURES
from meshrl.rollout.engines.torch import build
from meshrl.trainer.config import ModelConfig, ParallelConfig
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, build_policy, open_hf
from meshrl.trainer.model.snapshot import WeightSnapshot, take_snapshot
from meshrl.trainer.model.untrainable import WANTED, spread_fault
from meshrl.trainer.ranks.world import World

VOCABULARY, PROMPT, WINDOW, RANKS = 64, 2, 6, 2
SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
ROUTED: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
HYBRID: Mapping[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA: Mapping[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8},
    "Qwen3Next": {**EXPERTS, **HYBRID, "shared_expert_intermediate_size": 24},
    "Qwen3_5Text": {**HYBRID},
    "Qwen3_5MoeText": {**EXPERTS, **HYBRID, "shared_expert_intermediate_size": 24},
    "KimiLinear": {
        **EXPERTS,
        **LATENT,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 2,
    },
    "NemotronH": {
        "layers_block_type": ["mamba", "attention"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "FalconH1": {"head_dim": 8, **MAMBA, "mamba_d_ssm": 64},
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "OlmoHybrid": {**HYBRID},
    "Jamba": {"mamba_d_state": 8, "num_experts": 1, "attn_layer_offset": 1},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "Gemma3Text": {"head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "Phi": {},
    "Phi3": {},
    "Glm": {"head_dim": 8},
    "Glm4": {"head_dim": 8},
    "Glm4Moe": {**ROUTED, "head_dim": 8},
    "DeepseekV3": {**ROUTED, **LATENT},
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": WINDOW,
    },
    "SmolLM3": {},
    "Olmo2": {},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "Llama4Text": {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8},
    "Mamba": {"state_size": 4},
}
"""transformers' name of the configuration, and what it has beside SHAPE."""


@dataclass(slots=True)
class Tried:
    """The result for one architecture: figures, or the reason why there are none."""

    name: str
    logprobs: str = ""
    """Greatest difference of a packed log-prob from transformers' own."""
    gradients: str = ""
    """Greatest difference of a parameter's gradient, as a share of its norm."""
    spread: str = ""
    """The same where two ranks share the experts."""
    published: str = ""
    served: str = ""
    """Greatest difference of the embedded engine's log-probs from the policy's, after a step."""
    note: str = ""
    """The point where it failed, and the reason."""


def rows() -> list[Int32]:
    """Rows of 5, 11 and 17 tokens."""
    draw = np.random.default_rng(0)
    return [draw.integers(3, VOCABULARY, n).astype(np.int32) for n in (5, 11, 17)]


def random_checkpoint(name: str, directory: Path) -> None:
    """Weights that let every part say something."""
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **KINDS[name]})
    torch.manual_seed(0)
    factory: Any = transformers.AutoModelForCausalLM
    hf = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    hf.save_pretrained(directory)


def attempt(name: str, directory: Path, world: World) -> Tried:
    """Go as far as it goes; what stops it becomes a note."""
    tried = Tried(name)
    random_checkpoint(name, directory)
    found: dict[str, Any] = {}
    steps: list[tuple[str, Callable[[], str]]] = [
        ("logprobs", lambda: _trains(directory, world, found)),
        ("gradients", lambda: _gradients(directory, found)),
        ("published", lambda: _published(directory, world, found)),
        ("served", lambda: asyncio.run(_served(directory, found))),
    ]
    for step, take in steps:
        try:
            setattr(tried, step, take())
        except Exception as error:  # whatever it is, it is what came out
            reason = (str(error).splitlines() or [""])[0].replace(f"model {directory}: ", "")
            reason = reason.removesuffix(f"; {WANTED}")
            kind = "" if isinstance(error, MeshError) else f"{type(error).__name__}: "
            setattr(tried, step, "no")
            tried.note = kind + reason
            break
    return tried


def _trains(directory: Path, world: World, found: dict[str, Any]) -> str:
    """The policy's log-probs of this rank's rows beside those of each row alone, in transformers' own attention."""
    policy = build_policy(open_hf(directory), world, ModelConfig(path=directory))
    factory: Any = transformers.AutoModelForCausalLM
    own = factory.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    wanted = []
    for row in rows():
        tokens = torch.from_numpy(row)[None].long()
        logprobs = own(tokens).logits[0, :-1].float().log_softmax(-1)
        wanted.append(logprobs.gather(1, tokens[0, 1:, None])[PROMPT - 1 :, 0])
    mine = slice(world.rank, None, world.size)
    logprobs, _ = policy(pack(rows()[mine], [PROMPT] * len(rows()[mine])), 1.0)
    found |= {"policy": policy, "own": own}
    torch.autograd.backward(-torch.cat(wanted).sum())
    # FSDP's gradients are means over the ranks.
    torch.autograd.backward(-logprobs.sum() * world.size)
    return figure((logprobs - torch.cat(wanted[mine])).abs().max())


def _gradients(directory: Path, found: dict[str, Any]) -> str:
    return gradients_apart(
        found["policy"], {name: each.grad for name, each in found["own"].named_parameters()}
    )


def gradients_apart(policy: Policy, theirs: Mapping[str, torch.Tensor | None]) -> str:
    """Greatest difference of a parameter's gradient from `theirs`, as a share of its norm."""
    ours, wanted = {}, {}
    for name, parameter in policy.named_tensors():
        their, grad = theirs[name], parameter.grad
        if (their is None) is not (grad is None):
            raise AssertionError(f"only one side has a gradient of {name}")
        if their is not None and grad is not None:
            ours[name], wanted[name] = grad.full_tensor(), their  # type: ignore[attr-defined]
    return f"{apart(ours, wanted):.0e}"


def apart(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Greatest difference of a tensor, as a share of its norm.

    Of one that is 0 but for rounding, as the gradient of a key's bias is, of 1/10,000 of the greatest norm.
    """
    if found.keys() != wanted.keys():
        raise AssertionError(f"other names: {sorted(found.keys() ^ wanted.keys())}")
    norms = {name: float(value.norm()) for name, value in wanted.items()}
    least = 1e-4 * max(norms.values())
    return max(
        float((found[name] - value).norm()) / max(norms[name], least)
        for name, value in wanted.items()
    )


def spread(names: list[str]) -> dict[str, str]:
    """`gradients` of two ranks that share the experts, by name."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        start: Any = spawn  # torch leaves it untyped
        start(_rank, (names, directory, port), nprocs=RANKS)
        found: dict[str, str] = json.loads((Path(directory) / "found.json").read_text())
    return found


def _rank(rank: int, names: list[str], directory: str, port: int) -> None:
    """One of the ranks; the first writes what was found."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    world, figures = World.start("cpu", ParallelConfig(expert=RANKS)), {}
    for name in names:
        checkpoint = Path(directory) / name
        if world.is_main:
            random_checkpoint(name, checkpoint)
        world.barrier()
        found: dict[str, Any] = {}
        _trains(checkpoint, world, found)
        figures[name] = _gradients(checkpoint, found)
    if world.is_main:
        (Path(directory) / "found.json").write_text(json.dumps(figures))
    world.close()


def _published(directory: Path, world: World, found: dict[str, Any]) -> str:
    """A step of AdamW, and the names of what engines would get beside those of the checkpoint."""
    policy: Policy = found["policy"]
    Optimizers(policy, OptimConfig(lr=1e-2)).step(1e-2)
    sent = take_snapshot(
        policy, world, run="r", version=Version(1, 0), dtype="float32", bucket_bytes=1 << 20
    )
    found["sent"] = sent
    assert sent is not None
    stored: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            stored |= set(opened.keys())
    apart = sorted(stored ^ {spec.name for spec in sent.manifest.tensors})
    if apart:
        raise AssertionError(f"published and stored differ in {apart[0]} and {len(apart) - 1} more")
    return "yes"


async def _served(directory: Path, found: dict[str, Any]) -> str:
    """A greedy response of the embedded engine, beside the policy's log-probs of it."""
    sent: WeightSnapshot = found["sent"]
    policy: Policy = found["policy"]
    (architecture,) = json.loads((directory / "config.json").read_text())["architectures"]
    if architecture not in TORCH_ARCHITECTURES:
        return "no"
    engine = build({"device": "cpu"}, model=directory, slots=1)
    await engine.start()
    try:
        await engine.stage_weights(sent.manifest, sent.buckets)
        await engine.commit_weights(sent.manifest.version, OnUpdate.DRAIN)
        prompt = rows()[0]
        request = GenerateRequest(
            request_id="r",
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=WINDOW),
        )
        deltas = [delta async for delta in engine.generate(request)]
    finally:
        await engine.close()
    text = np.concatenate([prompt, *(delta.tokens for delta in deltas)]).astype(np.int32)
    with torch.no_grad():
        wanted, _ = policy(pack([text], [len(prompt)]), 1.0)
    logprobs = torch.from_numpy(np.concatenate([delta.logprobs for delta in deltas]))
    return figure((logprobs - wanted).abs().max())


def is_mixture(name: str) -> bool:
    """Whether the model has experts."""
    return any("experts" in key for key in KINDS[name])


def has_shared_experts(name: str) -> bool:
    """Can ranks share them?"""
    config = getattr(transformers, f"{name}Config")
    return is_mixture(name) and not spread_fault({"model_type": config.model_type})


def figure(value: torch.Tensor) -> str:
    """As the tables have it."""
    return f"{value.item():.0e}"


PAGE = """# Models

Which of transformers' causal language models are trained. Written by

```
python -m tests.doubles.architectures --write docs/reference/models.md
```

with transformers {transformers} and torch {torch}: random models of two layers in float32 on a CPU.
1e-5 and below is rounding.

- **log-probs**: greatest difference in a pack of three rows from transformers' own of each row alone.
- **gradients**: greatest difference from the sum over the rows, as a share of the gradient's norm.
- **experts on 2 ranks**: the same with `trainer.parallel.expert: 2` (gloo).
- **published**: after a step, engines get the names of the checkpoint.
- **`torch` engine**: greatest difference of its log-probs from the policy's, after that step.

{table}

Served by real servers: [vLLM](vllm.md#what-was-run), [SGLang](sglang.md#what-was-run). Others:
[vision-language models](vision-models.md), [2 and 4 ranks](../measurements/several-ranks.md).
Attention with softcaps (Gemma 2) or sinks (GPT-OSS) keeps all scores of a row in memory.
"""


def page(found: list[Tried]) -> str:
    """The page of all that was tried."""
    lines = [
        "| model | log-probs | gradients | experts on 2 ranks | published | `torch` engine | what stops it |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for each in found:
        lines.append(f"| {' | '.join(dataclasses.astuple(each))} |")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    return PAGE.format(table="\n".join(lines), **versions)


def replace_section(page: Path, heading: str, text: str) -> None:
    """Write `text` in place of the section of `page` that begins with `heading`; it begins with it, too."""
    before, _, after = page.read_text().partition(heading)
    kept = "".join(after.partition("\n## ")[1:])
    page.write_text(f"{before.rstrip()}\n\n{text}{kept}".lstrip())


def parser_of(doc: str | None, known: Iterable[str]) -> argparse.ArgumentParser:
    """The parser that the commands of a table of models share: names of models, and the page that has the table."""
    names = list(known)

    def one(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"no model {name!r} (known: {', '.join(names)})")
        return name

    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("names", nargs="*", type=one, help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--write", type=Path, help="the page that has the table")
    return parser


def main() -> int:
    """The exit code."""
    options = parser_of(__doc__, KINDS).parse_args()
    world = World.start("cpu")
    found = []
    for name in options.names or KINDS:
        with tempfile.TemporaryDirectory() as directory:
            found.append(attempt(name, Path(directory), world))
        print(found[-1], flush=True)
    world.close()
    mixtures = [
        each.name
        for each in found
        if each.gradients not in ("", "no") and has_shared_experts(each.name)
    ]
    for name, figure in spread(mixtures).items() if mixtures else ():
        next(each for each in found if each.name == name).spread = figure
        print(f"{name}, experts on {RANKS} ranks: {figure}", flush=True)
    if options.write:
        # Sections below are other commands'.
        kept = "".join(options.write.read_text().partition("\n## ")[1:])
        options.write.write_text(page(found) + kept)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
