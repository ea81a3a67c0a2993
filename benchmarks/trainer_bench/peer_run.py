"""TRL's side of time to accuracy: GRPOTrainer samples, scores and trains on the demo's task.

Held-out accuracy is measured greedily every few steps with the clock stopped.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def rows_of(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def score_of(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("reward_of_recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda solution, answer: float(module.compute_score("", solution, answer)["score"])


class Clock(TrainerCallback):
    """Evaluates, and ends the run when it is good enough or out of time."""

    def __init__(self, order: dict[str, Any], tokenizer: Any, score: Any) -> None:
        self._order, self._tokenizer, self._score = order, tokenizer, score
        self._rows = rows_of(order["held_out"])
        self.curve: list[dict[str, float]] = []
        self.began = self.stopped = 0.0

    @property
    def seconds(self) -> float:
        """Since training began, evaluations left out."""
        return time.time() - self.began - self.stopped

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.began = time.time()
        self._evaluate(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step % self._order["test_freq"] == 0:
            accuracy = self._evaluate(state.global_step, model)
            if accuracy >= self._order["target"]:
                control.should_training_stop = True
        if self.seconds > self._order["limit_s"]:
            control.should_training_stop = True

    @torch.no_grad()
    def _evaluate(self, step: int, model: Any) -> float:
        seconds, paused = self.seconds, time.time()
        model.eval()
        prompts = [row["prompt"] for row in self._rows]
        batch = self._tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=False,
            max_new_tokens=self._order["max_response_length"],
            use_cache=True,
        )
        texts = self._tokenizer.batch_decode(
            out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        model.train()
        right = [
            self._score(text, row["answer"]) for text, row in zip(texts, self._rows, strict=True)
        ]
        accuracy = sum(right) / len(right)
        self.curve.append({"step": step, "seconds": round(seconds, 2), "accuracy": accuracy})
        print(f"  trl     step {step:3} {seconds:7.1f} s  accuracy {accuracy:.3f}", file=sys.stderr)
        self.stopped += time.time() - paused
        return accuracy


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
    print(json.dumps({"began": clock.began, "curve": clock.curve}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
