"""GRPO on the demo's task by the Tinker SDK: python tinker_loop.py MODEL TRAIN HELD_OUT [STEPS]."""

import json
import sys
from pathlib import Path

import numpy as np
import tinker
from tinker import types
from transformers import AutoTokenizer

base, *files = sys.argv[1:4]
steps = int(sys.argv[4]) if len(sys.argv) > 4 else 10
train, held_out = (
    [json.loads(row) for row in Path(name).read_text().splitlines()] for name in files
)
tokenizer = AutoTokenizer.from_pretrained(base)
client = tinker.ServiceClient().create_lora_training_client(base_model=base, rank=32).result()


def answers(sampler, rows, samples, temperature):
    """Each row, its prompt and its samples; all are asked for before one is awaited."""
    params = types.SamplingParams(max_tokens=96, temperature=temperature)
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    asked = [sampler.sample(types.ModelInput.from_ints(each), samples, params) for each in prompts]
    return zip(rows, prompts, [future.result().sequences for future in asked], strict=True)


def score(row, sequence):
    """1 for the right digit after the last `#`."""
    text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    return float(text.rpartition("#")[1:] == ("#", row["answer"]))


for step in range(steps + 1):
    sampler = client.save_weights_and_get_sampling_client().result()
    if step % 5 == 0:
        greedy = answers(sampler, held_out[:100], 1, 0.0)
        print(f"step {step}: held-out {np.mean([score(row, s[0]) for row, _, s in greedy])}")
    if step == steps:
        break
    data = []
    for row, prompt, sequences in answers(sampler, train[step * 32 :][:32], 8, 1.0):
        scores = np.array([score(row, sequence) for sequence in sequences])
        for sequence, advantage in zip(sequences, scores - scores.mean(), strict=True):
            tokens, skipped = prompt + list(sequence.tokens), [0.0] * (len(prompt) - 1)
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": skipped + list(sequence.logprobs),
                "advantages": skipped + [advantage / 8] * len(sequence.tokens),
            }
            read = types.ModelInput.from_ints(tokens[:-1])
            data.append(types.Datum(model_input=read, loss_fn_inputs=inputs))
    client.forward_backward(data, "importance_sampling")
    client.optim_step(types.AdamParams(learning_rate=4e-3, grad_clip_norm=1.0)).result()
