"""TRL's side: the loss, backward pass and optimizer step of its GRPOTrainer on a batch that is ready and padded.

What its training loop does around them (sampling, rewards, logging, callbacks) is left out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import measure
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad
from work import CLIP_HIGH, CLIP_LOW, DUAL_CLIP, GROUP, LEARNING_RATE, Work


def trainer_of(order: dict[str, Any], work: Work) -> GRPOTrainer:
    rows, micro = work.groups * GROUP, order["micro_rows"]
    config = GRPOConfig(
        output_dir=order["directory"],
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=GROUP,
        max_completion_length=work.response,
        loss_type="dapo",
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        delta=DUAL_CLIP,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=order["checkpointing"],
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(order["model"]),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["?"] * rows}),
    )


def padded(work: Work) -> dict[str, torch.Tensor]:
    """As GRPOTrainer pads what it has sampled: prompts on the left, completions on the right, to the longest."""
    rows = work.batch()
    prompts = [torch.from_numpy(row.prompt).long() for row in rows]
    completions = [torch.from_numpy(row.response).long() for row in rows]
    old = [torch.from_numpy(row.old_logprobs) for row in rows]
    return {
        "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(p) for p in prompts], 0, padding_side="left"),
        "completion_ids": pad(completions, padding_value=0, padding_side="right"),
        "completion_mask": pad([torch.ones_like(c) for c in completions], 0, padding_side="right"),
        "old_per_token_logps": pad(old, padding_value=0.0, padding_side="right"),
        "advantages": torch.from_numpy(work.advantages()).float(),
    }


def main(order: dict[str, Any]) -> None:
    torch.set_num_threads(order["threads"])
    work = Work(**order["work"])
    trainer, batch = trainer_of(order, work), padded(work)
    trainer.create_optimizer()
    trainer.model.train()
    size, micro = len(batch["advantages"]), order["micro_rows"]
    trainer.current_gradient_accumulation_steps = size // micro
    total = batch["completion_mask"].sum()
    parts = [
        {name: column[start : start + micro] for name, column in batch.items()}
        for start in range(0, size, micro)
    ]

    def step() -> dict[str, float]:
        loss, entropies = 0.0, trainer._metrics["train"]["entropy"]
        entropies.clear()
        for part in parts:
            part_loss = trainer.compute_loss(trainer.model, part | {"num_items_in_batch": total})
            # What `training_step` does: the division by the number of parts is in the loss already.
            trainer.accelerator.backward(part_loss)
            loss += float(part_loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        weights = [float(part["completion_mask"].sum()) for part in parts]
        entropy = sum(e * w for e, w in zip(entropies, weights, strict=True)) / sum(weights)
        return {"loss": loss, "grad_norm": float(norm), "entropy": entropy}

    print(json.dumps(measure.steps(step, order["steps"])))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
