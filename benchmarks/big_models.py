"""Host memory of a trainer's ranks that load, train, save, resume and export models of 10^9 parameters.

    python benchmarks/big_models.py [load] [reference] [train] [experts] [export] [--small] [--folder /tmp/big]

Random models in the shape of Qwen3, as bfloat16 checkpoints, on this CPU over gloo:

    load       0.6 B on 4 ranks: what loading takes beside the shard
    reference  the same of a reference over 4 ranks, and what it takes to answer
    train      0.6 B on 2 ranks: a step of AdamW, a checkpoint, one that is written beside further passes, and a
               resumed run in new processes, to the same bits
    experts    the same of a mixture of 0.6 B whose experts the ranks share
    export     1.5 B in bfloat16 on 2 ranks: loaded, exported

Memory is what a rank has for itself (RssAnon of /proc/self/status, every 5 ms) above what it had before it loaded;
pages of mapped files are the kernel's. `--small` takes models of 0.03 B (a mixture of 0.06 B) in the same shapes
instead. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
VOCABULARY = 151_936
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.6B": ("Qwen3Config", SMALL),
    "0.6B mixture": (
        "Qwen3MoeConfig",
        SMALL
        | {"num_hidden_layers": 12, "num_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 1280},
    ),
    "1.5B": (
        "Qwen3Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
}
LITTLE = {
    "vocab_size": 16_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "moe_intermediate_size": 384,
}
"""Sizes that `--small` changes in a shape."""
STEPS = {
    "load": ("0.6B", 4),
    "reference": ("0.6B", 4),
    "train": ("0.6B", 2),
    "experts": ("0.6B mixture", 2),
}
STEPS["export"] = ("1.5B", 2)


def write(shape: str, path: Path, *, small: bool) -> None:
    """A random checkpoint in bfloat16."""
    import torch
    import transformers

    name, sizes = SHAPES[shape]
    sizes = sizes | {key: value for key, value in LITTLE.items() if small and key in sizes}
    factory: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    hf = factory.from_config(getattr(transformers, name)(**sizes), dtype=torch.bfloat16)
    hf.save_pretrained(path, max_shard_size="500MB")


class Peak:
    """The most memory that this process has had for itself, sampled."""

    def __init__(self) -> None:
        self.start = self.most = self._now()
        threading.Thread(target=self._watch, daemon=True).start()

    def take(self) -> int:
        """MiB above the start since the last call."""
        found, self.most = self.most, self._now()
        return (found - self.start) // MIB

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, self._now())
            time.sleep(0.005)

    def _now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) << 10


def rank(step: str, path: Path, work: Path) -> None:
    """One rank of a step; prints its figures as JSON."""
    import torch

    torch.set_num_threads(1)
    kinds = {"export": exports, "load": loads, "reference": refers}
    found = kinds.get(step, trains)(step, path, work)
    print(json.dumps(found), flush=True)


def loads(step: str, path: Path, work: Path) -> dict[str, Any]:
    """Figures of a policy that is loaded."""
    from meshrl.trainer.config import ModelConfig
    from meshrl.trainer.model.policy import build_policy, open_hf
    from meshrl.trainer.model.sharding import decoder_layers
    from meshrl.trainer.ranks.world import World

    world, peak = World.start("cpu"), Peak()
    policy = build_policy(open_hf(path), world, ModelConfig(path=path))
    took = peak.take()
    world.barrier()
    shard = sum(p.to_local().nbytes for p in policy.parameters()) // MIB
    layer = sum(p.nbytes for p in decoder_layers(policy.hf)[0].parameters()) // MIB
    world.close()
    bound = 1.3 * shard + layer
    return {"peak_mib": took, "shard_mib": shard, "layer_mib": layer, "of_bound": took / bound}


def trains(step: str, path: Path, work: Path) -> dict[str, Any]:
    """Figures of a step, or of the run that goes on from it where there is a checkpoint."""
    import numpy as np
    import torch

    from meshrl.trainer.checkpoint import checkpoint
    from meshrl.trainer.checkpoint.checkpoint import TrainerState
    from meshrl.trainer.config import ModelConfig, ParallelConfig
    from meshrl.trainer.learner.optimizer import Optimizers
    from meshrl.trainer.learner.optimizer_config import OptimConfig
    from meshrl.trainer.model.packing import pack
    from meshrl.trainer.model.policy import build_policy, open_hf
    from meshrl.trainer.ranks.world import World

    ranks = int(os.environ["WORLD_SIZE"])
    world = World.start("cpu", ParallelConfig(expert=ranks if step == "experts" else 1))
    peak = Peak()
    policy = build_policy(open_hf(path), world, ModelConfig(path=path))
    optimizers = Optimizers(policy, OptimConfig(lr=1e-4))
    state = TrainerState(run="r", step=1, epoch=1, seed=0, world_size=ranks, kl_coef=0.0)
    figures: dict[str, Any] = {"load_mib": peak.take()}
    row = (
        np.random.default_rng(world.rank)
        .integers(3, policy.hf.config.vocab_size, 32)
        .astype(np.int32)
    )
    packed = pack([row], [4])
    if found := checkpoint.newest(work, world):
        checkpoint.load(found[0], policy, optimizers)
        figures["resume_mib"] = peak.take()
    else:
        logprobs, _ = policy(packed, 1.0)
        (-logprobs.sum()).backward()
        optimizers.step(1e-4)
        figures["step_mib"] = peak.take()
        checkpoint.save(work, policy, optimizers, state, world, keep=1)
        figures["save_mib"] = peak.take()
        figures["beside"] = saves_beside(policy, optimizers, state, world, packed, work)
        figures["beside_mib"] = peak.take()
    with torch.no_grad():
        figures["logprobs"] = policy(packed, 1.0)[0].tolist()
    moments = [v for part in optimizers.parts for s in part.state.values() for v in s.values()]
    tensors = [*policy.parameters(), *moments]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    figures["held_mib"] = sum(t.nbytes for t in local) // MIB
    world.close()
    return figures


def saves_beside(
    policy: Any, optimizers: Any, state: Any, world: Any, packed: Any, work: Path
) -> dict[str, float]:
    """Seconds of a forward and a backward pass alone and beside a checkpoint's writer, and of that writer's parts."""
    from concurrent.futures import Future, ThreadPoolExecutor

    from meshrl.trainer.checkpoint import checkpoint

    def passes(writing: Future[Path] | None) -> list[float]:
        seconds: list[float] = []
        while len(seconds) < 2 or writing is not None:
            began = time.monotonic()
            (-policy(packed, 1.0)[0].sum()).backward()
            optimizers.zero_grad()
            seconds.append(time.monotonic() - began)
            # Every rank stops after the same pass: when the last one has written.
            if writing is not None and all(world.all_gather_text("x" * writing.done())):
                break
        return seconds

    alone = passes(None)[-1]
    began = time.monotonic()
    frozen = checkpoint.freeze(policy, optimizers)
    copied = time.monotonic()
    own = world.with_own_group()
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(
            checkpoint.write,
            work / "beside",
            frozen,
            state,
            own,
            keep=checkpoint.Keep(newest=1),
        )
        seconds = passes(writing)
    return {
        "pass_alone_s": round(alone, 2),
        "copy_s": round(copied - began, 2),
        "write_s": round(time.monotonic() - copied, 2),
        "passes_beside": len(seconds),
        "pass_beside_s": round(sum(seconds) / len(seconds), 2),
    }


def refers(step: str, path: Path, work: Path) -> dict[str, Any]:
    """Figures of a reference that is loaded and asked for the log-probs of some rows."""
    import asyncio

    import numpy as np

    from meshrl.trainer.model.sharding import decoder_layers
    from meshrl.trainer.ranks.world import World
    from meshrl.trainer.reference.model import ReferenceModel

    world, peak = World.start("cpu"), Peak()
    model = ReferenceModel(path, device="cpu", world=world)
    figures: dict[str, Any] = {"peak_mib": peak.take()}
    policy = model._policy
    shard = sum(p.to_local().nbytes for p in policy.parameters()) // MIB
    layer = sum(p.nbytes for p in decoder_layers(policy.hf)[0].parameters()) // MIB
    if world.is_main:
        rows = [np.arange(3, 35, dtype=np.int32)] * 4
        asyncio.run(model.judged(rows))
        model.close()
    else:
        model.follow()
    figures["forward_mib"] = peak.take()
    world.close()
    bound = 1.3 * shard + layer
    figures |= {"shard_mib": shard, "layer_mib": layer}
    return figures | {"of_bound": figures["peak_mib"] / bound}


def exports(step: str, path: Path, work: Path) -> dict[str, Any]:
    """Figures of a policy that is loaded in bfloat16 and exported."""
    import torch

    from meshrl.trainer.checkpoint.export import export_policy
    from meshrl.trainer.config import ModelConfig
    from meshrl.trainer.model.policy import build_policy, open_hf
    from meshrl.trainer.ranks.world import World

    world, peak = World.start("cpu"), Peak()
    policy = build_policy(open_hf(path, torch.bfloat16), world, ModelConfig(path=path))
    figures: dict[str, Any] = {"load_mib": peak.take()}
    export_policy(policy, world, work, tokenizer=path, dtype="bfloat16", max_shard_size="1GB")
    figures |= {"export_mib": peak.take()}
    figures["shard_mib"] = sum(p.to_local().nbytes for p in policy.parameters()) // MIB
    world.close()
    return figures


def run(step: str, ranks: int, path: Path, work: Path) -> list[dict[str, Any]]:
    """The figures of each rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", step, str(path), str(work)],
            env=os.environ
            | {key: str(value) for key, value in {**place, "RANK": n, "LOCAL_RANK": n}.items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"{step}: a rank ended with {[process.returncode for process in started]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def same(exported: Path, start: Path) -> bool:
    """Whether two checkpoints have the same tensors."""
    import torch

    from meshrl.trainer.model.lora import BaseModel

    one, other = BaseModel(exported), BaseModel(start)
    return one.names == other.names and all(
        torch.equal(one.tensor(name), other.tensor(name)) for name in one.names
    )


def measure(step: str, folder: Path, *, small: bool) -> dict[str, Any]:
    """One step of the list above."""
    shape, ranks = STEPS[step]
    shape = f"{shape} made small" if small else shape
    path, work = folder / shape.replace(" ", "-"), folder / f"work-{step}"
    if not path.is_dir():
        write(STEPS[step][0], path, small=small)
    shutil.rmtree(work, ignore_errors=True)
    try:
        figures = run(step, ranks, path, work)
        for number, each in enumerate(figures):
            shown = {key: value for key, value in each.items() if key != "logprobs"}
            print(f"{step}, {shape}, rank {number} of {ranks}: {shown}", flush=True)
        found: dict[str, Any] = {"ranks": figures}
        if "of_bound" in figures[0]:
            found["holds"] = all(each["of_bound"] <= 1 for each in figures)
        elif step == "export":
            found["holds"] = same(work, path)
            found["files"] = sorted(file.name for file in work.glob("*.safetensors"))
        else:
            resumed = run(step, ranks, path, work)
            for number, each in enumerate(resumed):
                shown = {key: value for key, value in each.items() if key != "logprobs"}
                print(f"{step}, resumed, rank {number}: {shown}", flush=True)
            pairs = zip(figures, resumed, strict=True)
            found["resumed"] = resumed
            found["holds"] = all(a["logprobs"] == b["logprobs"] for a, b in pairs)
            for each in (*figures, *resumed):
                del each["logprobs"]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{step}: {'holds' if found['holds'] else 'DOES NOT HOLD'}", flush=True)
    return found


def main() -> int:
    """Run what was asked for; 1 where something does not hold."""
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", help=f"of {', '.join(STEPS)}; default: all")
    parser.add_argument("--small", action="store_true", help="models of 0.03 B")
    parser.add_argument("--folder", type=Path, help="keeps the models; default: a temporary one")
    options = parser.parse_args()
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no step {unknown.pop()!r}")
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = options.folder or Path(temporary)
        found = {
            step: measure(step, folder, small=options.small) for step in options.steps or STEPS
        }
    print(json.dumps(found))
    return 0 if all(each["holds"] for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
