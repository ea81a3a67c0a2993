"""Run directories for the tests and pictures of `meshrl view`, and what the services of a run would say."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from meshrl.common.tracing import row_trace
from meshrl.config import load_recipe
from meshrl.config.loading import save_recipe
from meshrl.contract.errors import UnavailableError
from meshrl.contract.types import Media, Uid
from meshrl.trainer.trajectories.files import PICTURES, PictureFiles
from meshrl.trainer.trajectories.table import schema

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
RECIPE = "model: {path: /models/Qwen2.5-0.5B-Instruct}\ndata: {train_files: [train.jsonl]}\n"


def add_steps(directory: Path, first: int, last: int, seed: int = 0) -> None:
    """Append the metrics of steps `first` to `last - 1`."""
    draw = random.Random(seed * 1000 + first)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "metrics.jsonl").open("a") as file:
        for step in range(first, last):
            risen = 1 - math.exp(-step / (35 + 15 * seed))
            line = {
                "step": step,
                "reward/mean": 0.1 + 0.75 * risen + draw.gauss(0, 0.04),
                "response/length_mean": 180 + 220 * risen + draw.gauss(0, 12),
                "actor/entropy": 0.9 * math.exp(-step / 90) + 0.2 + draw.gauss(0, 0.01),
                "actor/ppo_kl": abs(draw.gauss(0.002, 0.001)),
                "actor/kl_loss": 0.0,
                "actor/pg_clipfrac": abs(draw.gauss(0.03, 0.01)),
                "actor/grad_norm": 0.4 + abs(draw.gauss(0, 0.15)),
                "throughput/tokens_per_s": 21000 + draw.gauss(0, 900),
                "staleness/mean": min(2, step) * 0.6 + abs(draw.gauss(0, 0.1)),
                "policy_version": f"1.{step + 1}",
            }
            file.write(json.dumps(line) + "\n")
            if step % 10 == 0:
                score = 0.08 + 0.8 * risen + draw.gauss(0, 0.01)
                file.write(json.dumps({"step": step, "val/score/mean": score}) + "\n")


def add_recipe(directory: Path, *overrides: str) -> None:
    """Save a recipe with every default, as `up` does."""
    directory.mkdir(parents=True, exist_ok=True)
    written = directory / "written.yaml"
    written.write_text(RECIPE)
    named = f"run.name={directory.name}"
    save_recipe(load_recipe(written, [named, *overrides], check=False), directory / "recipe.yaml")
    written.unlink()


def add_rows(
    directory: Path,
    step: int,
    groups: int = 6,
    size: int = 4,
    split: str = "train",
    *,
    hostile: bool = True,
) -> None:
    """Log the rows of a step: those of the last group have several turns; `hostile`: the first holds markup."""
    rows: list[dict[str, Any]] = []
    for group in range(groups):
        made = []
        for index in range(size):
            draw = random.Random(step * 10_000 + group * 100 + index)
            a, b = 12 + (step + 29 * group) % 68, 3 + (step + 7 * group) % 27
            row = tool_row(draw) if group == groups - 1 else sum_row(draw, a, b)
            made.append(_common(directory.name, step, group, index, size, split, draw) | row)
        rewards = [row["reward"] for row in made]
        for row in made:
            own = (row["reward"] - fmean(rewards)) / (pstdev(rewards) + 1e-6)
            row |= {
                "advantage": own,
                "advantages": [own if one else None for one in row["loss_mask"]],
            }
        rows += made
    if hostile:
        rows[0]["response"] = HOSTILE + rows[0]["response"]
        rows[0]["prompt"] = HOSTILE + rows[0]["prompt"]
        rows[0]["token_texts"][0] = HOSTILE
        rows[0]["ground_truth"] = json.dumps(HOSTILE)
    write_rows(directory, step, rows, split)


def add_many_rows(directory: Path, step: int, count: int = 100_000) -> None:
    """Log that many short rows, in groups of eight."""
    columns = {
        "task": [f"t{number // 8}" for number in range(count)],
        "index": [number % 8 for number in range(count)],
        "reward": [float(number % 7) for number in range(count)],
        "response": [f"answer {number}" for number in range(count)],
    }
    folder = directory / "trajectories"
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / f"step-{step}.parquet", row_group_size=4096)


def write_rows(
    directory: Path, step: int, rows: list[dict[str, Any]], split: str = "train"
) -> None:
    """One trajectory file."""
    folder = directory / "trajectories"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{'step' if split == 'train' else 'eval'}-{step}.parquet"
    pq.write_table(
        pa.Table.from_pylist(rows, schema=schema()),
        folder / name,
        compression="zstd",
        row_group_size=8192,
    )


def _common(
    run: str, step: int, group: int, index: int, size: int, split: str, draw: random.Random
) -> dict[str, Any]:
    task = f"gsm8k-{step * 16 + group:05d}"
    return {
        "uid": f"{run}/{task}/{index}.0",
        "task": task,
        "index": index,
        "attempt": 0,
        "group_size": size,
        "split": split,
        "step": step,
        "epoch": 1,
        "data_source": "openai/gsm8k",
        "staleness": draw.choice([0, 1, 1, 2]),
        "outcome": draw.choice(["ok", "ok", "ok", "ok", "truncated"]),
        "worker": f"rollout-{draw.randrange(2)}",
    }


def sum_row(draw: random.Random, a: int, b: int) -> dict[str, Any]:
    """One turn that works out a product."""
    right = draw.random() < 0.6
    answer = a * b if right else a * b + draw.choice([-10, 1, 7])
    question = f"A shop sells {b} boxes with {a} apples each. How many apples is that?"
    words = _split(
        f"<think>|There| are| {b}| boxes|,| each| with| {a}| apples|.|\n|So| we| need| {a}| ×| {b}|.|\n|"
        f"{a}| ×| {b // 10 * 10}| =| {a * (b // 10 * 10)}|,| and| {a}| ×| {b % 10}| =| {a * (b % 10)}|.|\n|"
        f"Together| that| is| {answer}|.|</think>|\n\n|The| answer| is| **|{answer}|**|.|<im_end>"
    )
    return {
        "prompt": f"<user>{question}</user><assistant>",
        "messages": [{"role": "user", "content": question}],
        "ground_truth": json.dumps(str(a * b)),
        "response": "".join(words[:-1]),
        "parts": None,
        "turns": 1,
        "prompt_length": 31,
        "reward": float(right),
        "reward_components": [("correct", float(right)), ("format", 1.0)],
    } | _tokens(words, [True] * len(words), draw)


def tool_row(draw: random.Random) -> dict[str, Any]:
    """Two turns with a tool call between them."""
    question = "What is the weather in Aarhus, in degrees Celsius?"
    call = _split(
        '<tool_call>|{"|name|":| "|weather|",| "|arguments|":| {"|city|":| "|Aarhus|"}}|</tool_call>'
    )
    result = _split('<tool>|{"|temperature_f|":| 50|.0|}|</tool>')
    degrees = draw.choice(["10", "10", "50"])
    end = _split(f"It| is| {degrees}| °C| in| Aarhus|.|<im_end>")
    words = call + result + end
    first, second = len(call), len(call) + len(result)
    right = degrees == "10"
    return {
        "prompt": f"<user>{question}</user><assistant>",
        "messages": [
            {"role": "system", "content": "You may call tools."},
            {"role": "user", "content": question},
        ],
        "ground_truth": json.dumps("10"),
        "response": "".join(end[:-1]),
        "parts": [
            {"sampled": True, "start": 0, "end": first, "text": "".join(call)},
            {"sampled": False, "start": first, "end": second, "text": "".join(result)},
            {"sampled": True, "start": second, "end": len(words), "text": "".join(end)},
        ],
        "turns": 2,
        "prompt_length": 44,
        "reward": float(right),
        "reward_components": [("correct", float(right)), ("calls", 1.0)],
    } | _tokens(
        words,
        [not first <= at < second for at in range(len(words))],
        draw,
    )


def add_picture_rows(directory: Path, step: int) -> None:
    """Log a row whose prompt and whose tool's answer have pictures, beside files that are none."""
    draw = random.Random(step)
    shots = [Media.of(_drawn(draw, *size)) for size in ((320, 200), (96, 96))]
    broken = Media.of(b"<svg xmlns='http://www.w3.org/2000/svg' onload='document.title=1'></svg>")
    PictureFiles(directory / "trajectories" / PICTURES, 1 << 20).keep([*shots, broken])
    row = _common(directory.name, step, 0, 0, 1, "train", draw) | tool_row(draw)
    row["pictures"] = [each.sha256 for each in (*shots, broken)] + ["0" * 64, HOSTILE]
    row["prompt"] = f"<|im_start|>{'<|image_pad|>' * 64}{row['prompt']}"
    row |= {"advantage": 0.0, "advantages": [0.0 for _ in row["loss_mask"]]}
    write_rows(directory, step, [row])


def _drawn(draw: random.Random, width: int, height: int) -> bytes:
    """Shapes on a ground, as PNG."""
    image = Image.new("RGB", (width, height), (236, 232, 222))
    canvas = ImageDraw.Draw(image)
    for colour in ("#c43", "#27a", "#393", "#e9b32f"):
        left, top = draw.randrange(width - 40), draw.randrange(height - 40)
        shape = draw.choice((canvas.ellipse, canvas.rectangle))
        shape((left, top, left + 40, top + 40), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _split(tokens: str) -> list[str]:
    return tokens.split("|")


def _tokens(words: list[str], mask: list[bool], draw: random.Random) -> dict[str, Any]:
    sampled = [-abs(draw.gauss(0, 0.7)) if own else None for own in mask]
    trained = [None if one is None else min(0.0, one + draw.gauss(0, 0.02)) for one in sampled]
    gaps = [
        abs(a - b) for a, b in zip(sampled, trained, strict=True) if a is not None and b is not None
    ]
    middle = len(words) * 2 // 3
    return {
        "length": len(words),
        "response_ids": [draw.randrange(150_000) for _ in words],
        "token_texts": words,
        "loss_mask": mask,
        "trained_mask": mask,
        "rollout_logprobs": sampled,
        "trainer_logprobs": trained,
        "mismatch": sum(gaps) / len(gaps),
        "spans": [
            {"epoch": 1, "step": 3, "start": 0, "end": middle},
            {"epoch": 1, "step": 4, "start": middle, "end": len(words)},
        ],
    }


def add_spans(directory: Path, step: int) -> None:
    """Write the spans of services for a step of four seconds."""
    folder = directory / "spans"
    folder.mkdir(exist_ok=True)
    run, base = directory.name, (1_800_000_000 + 4 * step) * 10**9

    def add(service: str, name: str, start: float, end: float, **facts: Any) -> None:
        trace, root = row_trace(Uid(run, f"gsm8k-{step}", facts.pop("row", 0)))
        span = {"trace": trace, "parent": root, "name": name, "service": service}
        span |= {"start_ns": base + int(start * 1e9), "end_ns": base + int(end * 1e9)}
        span |= {"span": f"{step:08x}{int(start * 1e6):08x}", "attributes": facts}
        with (folder / f"{service}.jsonl").open("a") as file:
            file.write(json.dumps(span) + "\n")

    add("trainer", "step", 0, 4, step=step)
    for name, start, end in (
        ("waiting", 0.0, 1.1),
        ("fetching", 1.1, 1.2),
        ("training", 1.2, 3.6),
        ("publishing", 3.6, 3.7),
    ):
        add("trainer", name, start, end, step=step)
    for replica in ("rollout-0", "rollout-1"):
        add("trainer", "publish", 3.6, 3.95, step=step, replica=replica, version=f"1.{step + 1}")
        for row in range(12):
            start = 0.25 * row + 0.1 * (replica == "rollout-1")
            uid = f"{run}/gsm8k-{step}/{row}.0"
            add(replica, "rollout", start, start + 1.1, uid=uid, row=row)
            add(replica, "generate", start, start + 1.0, turn=0, tokens=212, row=row)
            add("reward", "reward", start + 1.2, start + 1.3, uid=uid, row=row)


def two_runs(parent: Path, *, hostile: bool = True) -> list[Path]:
    """Two runs to be shown over each other; the first one has rollouts."""
    first, second = parent / "gsm8k-grpo", parent / "gsm8k-fast"
    for seed, directory in enumerate((first, second)):
        add_steps(directory, 0, 120, seed)
    add_recipe(first, "rollout.n=8", "queue.max_staleness=2", "algorithm.name=grpo")
    add_recipe(second, "rollout.n=16", "queue.max_staleness=2", "actor.optim.lr=3e-6")
    for step in (40, 60):
        add_rows(first, step, hostile=hostile)
    add_rows(first, 60, split="eval", groups=3, size=1, hostile=hostile)
    for step in (59, 60):
        add_spans(first, step)
    return [first, second]


class SaidServices:
    """A fleet of two and a queue, as their services would describe them."""

    def __init__(self, up: Sequence[str] = ("gsm8k-grpo",), *, hostile: bool = True) -> None:
        self.up = up
        self.replayed: list[tuple[str, str, str, str]] = []
        self._markup = f" {HOSTILE}" if hostile else ""

    def is_up(self, run_dir: Path) -> bool:
        return run_dir.name in self.up

    async def fleet(self, run_dir: Path) -> dict[str, Any]:
        if not self.is_up(run_dir):
            raise UnavailableError(f"the mesh in {run_dir} is not running")
        member = {
            "name": "rollout-0",
            "state": "SERVING",
            "version": "1.120",
            "carrier": "shm",
            "last_sync_s": 0.84,
            "pause_s": 0.021,
            "moved_bytes": 11_400_000,
            "reason": "",
            "restarts": 0,
            "answers": True,
            "running": 57,
            "capacity": 64,
            "tokens_per_s": 10412.0,
            "error_rate": 0.0,
            "breaker": "closed",
            "last_fault": "",
            "draining": False,
            "written": 7680,
            "failed": 3,
            "lost": 0,
        }
        slow = {
            "name": "rollout-1",
            "state": "SUSPECT",
            "moved_bytes": None,
            "version": "1.119",
            "running": 12,
            "tokens_per_s": 2077.0,
            "error_rate": 0.12,
            "breaker": "half_open",
            "restarts": 1,
            "failed": 41,
            "reason": f"no progress for 11 s{self._markup}",
        }
        silent = {
            key: member[key]
            for key in ("carrier", "last_sync_s", "pause_s", "moved_bytes", "reason", "version")
        } | {"name": "rollout-2", "state": "OUT", "answers": False, "restarts": None}
        members = [member, member | slow, silent | {"reason": "drained"}]
        return {"run": run_dir.name, "committed": "1.120", "proposed": "1.121", "members": members}

    async def replay(self, run_dir: Path, stage: str, outcome: str, reason: str) -> int:
        self.replayed.append((run_dir.name, stage, outcome, reason))
        return 44

    async def flow(self, run_dir: Path) -> dict[str, Any]:
        resident = {"leased": 64, "queued": 24, "pending": 9, "ready": 31, "settled": 256}
        return {
            "up": self.is_up(run_dir),
            "ledgers": [
                {
                    "run": run_dir.name,
                    "admitted": 8192,
                    "trained": 7424,
                    "filtered": {"every reward of the group is equal": 256},
                    "stale": {"older than queue.max_staleness": 84},
                    "dead_lettered": {f"deadline of 30 s passed{self._markup}": 44},
                    "resident": resident,
                    "balanced": True,
                },
                {
                    "run": f"{run_dir.name}.eval",
                    "admitted": 640,
                    "trained": 640,
                    "filtered": {},
                    "stale": {},
                    "dead_lettered": {},
                    "resident": {},
                    "balanced": True,
                },
            ],
            "waiting": [
                {
                    "who": "trainer",
                    "what": "32 ready groups: 27 are there",
                    "since_s": 4.21,
                    "owners": ["rollout-0", "rollout-1"],
                    "uids": [f"{run_dir.name}/gsm8k-00{n}/0.0" for n in range(5)],
                    "rows": 64,
                },
                {
                    "who": "feeder",
                    "what": "room: 384 rows are open, max_staleness allows 384",
                    "since_s": 1.3,
                    "owners": ["trainer"],
                    "uids": [],
                    "rows": 0,
                },
            ],
            "dead_letters": [
                {
                    "stage": "rollout",
                    "outcome": "timeout",
                    "reason": f"deadline of 30 s passed{self._markup}",
                    "rows": 44,
                    "uids": [f"{run_dir.name}/gsm8k-0812/3.2"],
                }
            ],
        }
