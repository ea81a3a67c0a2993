"""Compares models that read pictures with transformers' own: a table of them.

python -m tests.doubles.vision [NAME ...] [--write docs/reference/vision-models.md]

random weights ─▶ checkpoint ─▶ log-probs and gradients of a pack, beside transformers' own of each row
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText

from meshrl.testing.vision import KINDS, random_checkpoint
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World
from tests.doubles.architectures import figure, gradients_apart, parser_of, replace_section
from tests.doubles.vision_rows import logprobs_alone, packed, rows

HEADING = "## Vision-language models"
SECTION = (
    HEADING
    + """

Random models of two layers with trained vision towers, in float32 on a CPU; a pack of six rows
with up to two pictures. Written by

```
python -m tests.doubles.vision --write docs/reference/vision-models.md
```

with transformers {transformers} and torch {torch}.

- **log-probs**: greatest difference from transformers' own of each row alone.
- **gradients**: greatest difference from the sum over the rows by transformers, as a share of the
  gradient's norm.
- **separate rows**: the same, from the sum over the rows each in a pack of its own.

| model | log-probs | gradients | separate rows |
|---|---|---|---|
{table}

[2 and 4 ranks](../measurements/several-ranks.md); [recipes and limits](../how-to/pictures.md).
"""
)


def attempt(name: str, directory: Path, world: World) -> tuple[str, str, str]:
    """Log-probs, gradients and separate rows: see the page."""
    random_checkpoint(name, directory)
    config = ModelConfig(path=directory, freeze_vision_tower=False)
    policy = build_policy(open_hf(directory), world, config)
    factory: Any = AutoModelForImageTextToText
    own = factory.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    reader, given = VisionReader(directory, policy.hf), rows(directory)
    wanted = torch.cat([logprobs_alone(own, each, reader) for each in given])
    torch.autograd.backward(-wanted.sum())
    for each in given:
        alone, _ = policy(packed(reader, [each], share=False), 1.0)
        torch.autograd.backward(-alone.sum())
    separate = {
        name: None if parameter.grad is None else parameter.grad.full_tensor().clone()  # type: ignore[attr-defined]
        for name, parameter in policy.named_tensors()
    }
    policy.zero_grad()
    together, _ = policy(packed(reader, given), 1.0)
    torch.autograd.backward(-together.sum())
    return (
        figure((together.detach() - wanted.detach()).abs().max()),
        gradients_apart(policy, {n: p.grad for n, p in own.named_parameters()}),
        gradients_apart(policy, separate),
    )


def main() -> int:
    """The exit code."""
    options = parser_of(__doc__, KINDS).parse_args()
    world, lines = World.start("cpu"), []
    for name in options.names or KINDS:
        with tempfile.TemporaryDirectory() as directory:
            lines.append(f"| {name} | {' | '.join(attempt(name, Path(directory), world))} |")
        print(lines[-1], flush=True)
    world.close()
    if options.write:
        versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__.split("+")[0],
        }
        text = SECTION.format(table="\n".join(lines), **versions)
        replace_section(options.write, HEADING, text)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
