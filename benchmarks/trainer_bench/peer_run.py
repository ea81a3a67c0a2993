"""TRL's side of time to accuracy: GRPOTrainer samples, scores and trains on the demo's task.

Held-out accuracy is measured after every step with the clocks stopped.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from accuracy import accuracy, rows_of, score_of
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Evaluates, and ends the run when it is good enough or out of time."""

    def __init__(self, order: dict[str, Any], tokenizer: Any, score: Any) -> None:
        self._order, self._tokenizer, self._score = order, tokenizer, score
        self.curve: list[dict[str, float]] = []
        self.began = self.stopped = self.start_up_cpu_s = self.judging_cpu_s = 0.0

    @property
    def seconds(self) -> float:
        """Since training began, evaluations left out."""
        return time.time() - self.began - self.stopped

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.began, self.start_up_cpu_s = time.time(), time.process_time()
        self._evaluate(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        found = self._evaluate(state.global_step, model)
        if found >= self._order["target"] or self.seconds > self._order["limit_s"]:
            control.should_training_stop = True

    def _evaluate(self, step: int, model: Any) -> float:
        seconds, paused, cpu_s = self.seconds, time.time(), time.process_time()
        model.eval()
        order = self._order
        found = accuracy(
            model, self._tokenizer, order["held_out"], self._score, order["max_response_length"]
        )
        model.train()
        self.curve.append({"step": step, "seconds": round(seconds, 2), "accuracy": found})
        print(f"  trl     step {step:3} {seconds:7.1f} s  accuracy {found:.3f}", file=sys.stderr)
        self.stopped += time.time() - paused
        self.judging_cpu_s += time.process_time() - cpu_s
        return found


def main(order: dict[str, Any]) -> None:
    torch.set_num_threads(order["threads"])
    score, optim = score_of(order["reward"]), order["optim"]
    tokenizer = AutoTokenizer.from_pretrained(order["model"])
    rows = order["prompts"] * order["n"]
    config = GRPOConfig(
        output_dir=order["directory"],
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        per_device_train_batch_size=order["micro_rows"],
        gradient_accumulation_steps=rows // order["micro_rows"],
        num_generations=order["n"],
        max_completion_length=order["max_response_length"],
        temperature=order["temperature"],
        loss_type="dapo",
        epsilon=order["clip_low"],
        epsilon_high=order["clip_high"],
        delta=3.0,
        beta=order["kl_coef"],
        learning_rate=optim["lr"],
        warmup_steps=optim["lr_warmup_steps"],
        lr_scheduler_type="constant_with_warmup",
        weight_decay=optim["weight_decay"],
        max_grad_norm=optim["clip_grad"],
        gradient_checkpointing=False,
        max_steps=order["max_steps"],
        seed=order["seed"],
    )
    clock = Clock(order, tokenizer, score)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=lambda completions, answer, **_: [
            score(text, right) for text, right in zip(completions, answer, strict=True)
        ],
        args=config,
        train_dataset=Dataset.from_list(rows_of(order["train"])),
        callbacks=[clock],
    )
    trainer.train()
    found = {
        "began": clock.began,
        "curve": clock.curve,
        "start_up_cpu_s": clock.start_up_cpu_s,
        "cpu_s": time.process_time() - clock.judging_cpu_s - clock.start_up_cpu_s,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
