"""`python -m meshrl.testing.sglang_server --model-path DIR --port N …`: `sglang.launch_server`'s arguments."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import uvicorn

from meshrl.rollout.server_engine.checkpoint import read_checkpoint
from meshrl.testing.sglang_server.routes import Routes
from meshrl.testing.sglang_server.scheduler import Scheduler, Updates

VERSION = "0.5.23"
"""The SGLang version that it imitates."""


def main() -> None:
    """Serve until the process ends. Arguments of the real launcher that have no meaning here are ignored."""
    known, _ = _parser().parse_known_args()
    facts = read_checkpoint(known.model_path)
    scheduler = Scheduler(
        slots=known.max_running_requests,
        overlap=not known.disable_overlap_schedule,
        vocabulary=facts.vocab_size,
        eos=facts.eos_token_ids,
        step_s=known.step_s,
    )
    updates = Updates(scheduler, loaders=known.custom_weight_loader)
    info = {
        **{key: value for key, value in vars(known).items() if key != "model_path"},
        "model_path": str(known.model_path),
        "context_length": known.context_length or facts.max_length,
        "version": VERSION,
        # What its scheduler reports when it is ready, also as an internal state.
        "max_total_num_tokens": known.max_total_tokens,
        "max_req_input_len": min(known.max_total_tokens, known.context_length or facts.max_length),
        "internal_states": [{"memory_usage": {"token_capacity": known.max_total_tokens}}],
    }
    app = Routes(scheduler, updates, info=info, die=_die).app()
    uvicorn.run(app, host=known.host, port=known.port, log_level="warning", access_log=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--max-total-tokens", type=int, default=65536)
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dp-size", "--data-parallel-size", type=int, default=1)
    parser.add_argument("--weight-cache-mode", default="off")
    parser.add_argument("--sampling-mask-max-tokens", type=int, default=4096)
    parser.add_argument("--custom-weight-loader", nargs="*", default=[])
    parser.add_argument("--disable-overlap-schedule", action="store_true")
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument(
        "--cumulative-streaming-output",
        dest="incremental_streaming_output",
        action="store_false",
        help="ours: takes back the option before",
    )
    parser.add_argument(
        "--without-route", action="append", default=[], help="ours: be an older server"
    )
    parser.add_argument("--step-s", type=float, default=0.0, help="ours: time of a decode step")
    return parser


def _die(last_line: str) -> None:
    """End as a real server does: the scheduler's exception, then the process."""
    print(f"Scheduler hit an exception: {last_line}", file=sys.stderr)
    print(last_line, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
