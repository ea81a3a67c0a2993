"""Compares training by several ranks with training by one process, for every way in which ranks share the work.

python -m tests.doubles.equality [MODEL ...] [--ranks 2 4] [--training AdamW Muon]
    [--write docs/measurements/several-ranks.md]

random weights ─▶ checkpoint ─▶ three steps of the learner by one process ─▶ the same by 2 and 4 ranks (gloo)
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from typing_extensions import override

from meshrl.contract.errors import MeshError
from meshrl.contract.types import (
    Batch,
    BatchRow,
    Outcome,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
)
from meshrl.images import reads_images
from meshrl.testing import vision
from meshrl.trainer.config import ActorConfig, AlgorithmConfig, ModelConfig, ParallelConfig
from meshrl.trainer.learner.learner import Learner, RowContents, StepSettings
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.learner.policy_gradient import PolicyGradient
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World
from tests.doubles import vision_rows
from tests.doubles.architectures import (
    KINDS,
    PROMPT,
    VOCABULARY,
    apart,
    is_mixture,
    parser_of,
    random_checkpoint,
    replace_section,
)

STEPS, GROUPS, GROUP_SIZE, BUDGET = 3, 4, 2, 48


class Training(NamedTuple):
    """One way of training, and the models that it trains."""

    models: tuple[str, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    """Options of `actor`."""
    optimizer: str = "adamw"


TRAININGS = {
    "AdamW": Training(
        (
            "Qwen3",
            "Qwen3Moe",
            "DeepseekV3",
            "Mixtral",
            "GptOss",
            "Qwen3_5Text",
            "Qwen3Next",
            "Qwen3_5MoeText",
            "Qwen3VL",
            "SmolVLM",
        )
    ),
    "Muon": Training(("Qwen3", "Qwen3Moe", "DeepseekV3"), optimizer="muon"),
    # It is computed over a micro-batch: each row is one by itself, so that all have the same.
    "auxiliary loss": Training(
        ("Qwen3Moe", "Qwen3Next"), {"router_aux_loss_coef": 0.1, "ppo_max_token_len_per_gpu": 1}
    ),
    "routers' bias": Training(("DeepseekV3",), {"moe_router_bias_update_rate": 0.01}),
}
"""Trainings by their names in the table."""
HYBRIDS = ("Qwen3_5Text", "Qwen3Next", "Qwen3_5MoeText")
LAYOUTS: dict[int, tuple[dict[str, int], ...]] = {
    2: (
        {"data_shard": 2},
        {"data_replicate": 2},
        {"sequence": 2},
        {"tensor": 2},
        {"data_shard": 2, "expert": 2},
    ),
    4: (
        {"data_replicate": 2, "data_shard": 2},
        {"data_shard": 2, "sequence": 2},
        {"data_shard": 2, "tensor": 2},
        {"data_replicate": 2, "tensor": 2},
        {"sequence": 2, "tensor": 2},
        {"data_shard": 4, "expert": 2},
        {"data_replicate": 2, "data_shard": 2, "expert": 2},
        {"data_shard": 2, "sequence": 2, "expert": 4},
        {"data_shard": 2, "tensor": 2, "expert": 4},
    ),
}
"""Layouts by number of ranks: all options of `trainer.parallel`."""

HEADING = "# Several ranks and one"
SECTION = (
    HEADING
    + """

Three steps with gradients clipped, by the learner itself with several micro-batches a rank, beside the same by one
process; float32, gloo. This page is what

```
python -m tests.doubles.equality --write docs/measurements/several-ranks.md
```

found. What ranks share is named as in `trainer.parallel`.

- **training**: AdamW; Muon, whose orthogonalisation is in bfloat16, so that a gradient's rounding grows to some 1e-4
  (fused experts are no matrices and have AdamW); AdamW with `actor.router_aux_loss_coef`, or with
  `actor.moe_router_bias_update_rate`.
- **loss**: greatest difference of a step's.
- **gradient**: greatest difference of a parameter's in the first step, as a share of its norm.
- **weights**: greatest difference of a tensor after the last step, as engines get it, as a share of its norm.

| training | model | ranks | shared by | loss | gradient | weights |
|---|---|---|---|---|---|---|
{table}

With `tensor`, the attention of DeepSeek-V3 and GPT-OSS is computed by each rank: transformers' plans share their
experts, other MLPs and the vocabulary. Layers with a state (Qwen3.5, Qwen3-Next) are not shared by `sequence` or
`tensor`: refused.
"""
)

Work: TypeAlias = tuple[str, str]
"""A training and a model."""
Found: TypeAlias = dict[str, Any]
"""Results of a run: `loss` of the first step, its `gradients`, and `weights` as engines get them after the last."""


def rows() -> list[Trajectory]:
    """Rows of 5 to 30 tokens."""
    draw = np.random.default_rng(3)
    made = []
    for index in range(GROUPS * GROUP_SIZE):
        length = int(draw.integers(PROMPT + 3, 30))
        mask = np.array([0] * PROMPT + [1] * (length - PROMPT), dtype=np.uint8)
        made.append(
            Trajectory(
                uid=Uid("r", f"t{index // GROUP_SIZE}", index % GROUP_SIZE),
                tokens=draw.integers(3, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.full(length, -4.0, dtype=np.float32),
                spans=(VersionSpan(version=Version(1, 0), start=PROMPT, end=length),),
                reward=float(draw.random()),
                reward_components={},
            )
        )
    return made


class _Observed(Optimizers):
    """Keeps the gradients of its first step."""

    gradients: dict[str, torch.Tensor]

    @override
    def step(self, rate: float) -> float:
        if not hasattr(self, "gradients"):
            named = self._model.named_parameters()
            self.gradients = {n: whole(p.grad) for n, p in named if p.grad is not None}
        return super().step(rate)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it; every rank calls this."""
    value = tensor.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def train(checkpoint: Path, world: World, how: Training) -> Found:
    """Some steps of the learner."""
    sees = reads_images(checkpoint)
    chosen = {"name": how.optimizer, "lr": 1e-3, "clip_grad": 0.5}
    if sees:  # the gradient of a key's bias is 0 but for rounding, of which AdamW would make a step
        chosen["eps"] = 1e-5
    optim = OptimConfig.model_validate(chosen)
    # A budget of tokens that gives each rank several micro-batches.
    actor = ActorConfig.model_validate(
        {"optim": optim, "ppo_max_token_len_per_gpu": BUDGET, **how.options}
    )
    config = ModelConfig(path=checkpoint, freeze_vision_tower=False)
    policy = build_policy(open_hf(checkpoint), world, config)
    given = vision_rows.rows(checkpoint) if sees else rows()
    optimizers = _Observed(policy, optim)
    objective = PolicyGradient(AlgorithmConfig(), actor, max_response_length=30)
    learner = Learner(
        policy,
        optimizers,
        objective,
        world,
        StepSettings(actor=actor),
        RowContents(reader=VisionReader(checkpoint, policy.hf) if sees else None),
    )
    manifest = tuple(
        BatchRow(
            uid=row.uid,
            group=row.uid.task,
            group_size=GROUP_SIZE,
            num_tokens=len(row.tokens),
            oldest=Version(1, 0),
            newest=Version(1, 0),
            outcome=Outcome.OK,
        )
        for row in given
    )
    by_uid, losses = {row.uid: row for row in given}, []
    for step in range(STEPS):
        schedule = learner.schedule(Batch.of_rows(manifest, batch_id="b", run="r", step=step))
        own = [by_uid[uid] for uid in schedule.uids(world.data_rank)]
        losses.append(learner.learn(schedule, own, step)["actor/loss"])
    weights = {name: w.whole(torch.float32).clone() for name, w in policy.published_weights()}
    return {"losses": losses, "gradients": optimizers.gradients, "weights": weights}


def differences(found: Found, wanted: Found) -> tuple[float, float, float]:
    """Differences of the losses; of a gradient and of a weight, the greatest as a share of its norm."""
    losses = zip(found["losses"], wanted["losses"], strict=True)
    return max(abs(a - b) for a, b in losses), *(
        apart(found[kind], wanted[kind]) for kind in ("gradients", "weights")
    )


def _rank(rank: int, ranks: int, port: int, works: Sequence[Work], directory: str) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    first = World.start("cpu")
    for training, name in works:
        checkpoint = Path(directory) / name
        wanted = torch.load(checkpoint / f"{training}.pt")
        for layout in LAYOUTS[ranks]:
            if not _can_share(name, layout):
                continue
            world = World.start("cpu", ParallelConfig.model_validate(layout))
            try:
                found = train(checkpoint, world, TRAININGS[training])
                cells = " | ".join(f"{each:.0e}" for each in differences(found, wanted))
            except MeshError as error:  # the same on every rank
                cells = f"refused: {str(error).splitlines()[0]} | |"
            if world.is_main:
                line = f"| {training} | {name} | {ranks} | {_text(layout)} | {cells} |"
                with (Path(directory) / "found").open("a") as lines:
                    lines.write(f"{line}\n")
                print(line, flush=True)
    first.close()


def _can_share(name: str, layout: Mapping[str, int]) -> bool:
    if name in vision.KINDS:
        return not {"tensor", "expert"} & layout.keys()
    if name in HYBRIDS and {"sequence", "tensor"} & layout.keys():
        return False  # refused: their layers keep a state
    return "expert" not in layout or is_mixture(name)


def _text(layout: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in layout.items())


def compare(works: Sequence[Work], ranks: Sequence[int]) -> Iterator[str]:
    """Lines of the table."""
    with tempfile.TemporaryDirectory() as directory:
        world = World.start("cpu")
        for training, name in works:
            checkpoint = Path(directory) / name
            if not checkpoint.is_dir():
                make = vision.random_checkpoint if name in vision.KINDS else random_checkpoint
                make(name, checkpoint)
            alone = train(checkpoint, world, TRAININGS[training])
            torch.save(alone, checkpoint / f"{training}.pt")
        world.close()
        for number in ranks:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            start: Any = spawn  # torch leaves it untyped
            start(_rank, (number, port, works, directory), nprocs=number)
        yield from sorted((Path(directory) / "found").read_text().splitlines())


def main() -> int:
    """The exit code."""
    parser = parser_of(__doc__, [*KINDS, *vision.KINDS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], choices=[2, 4])
    parser.add_argument(
        "--training", nargs="+", default=list(TRAININGS), choices=TRAININGS, help="default: all"
    )
    options = parser.parse_args()
    works = [
        (training, name)
        for training in options.training
        for name in options.names or TRAININGS[training].models
    ]
    lines = list(compare(works, options.ranks))
    if options.write:
        replace_section(options.write, HEADING, SECTION.format(table="\n".join(lines)))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    assert not dist.is_initialized()
    sys.exit(main())
