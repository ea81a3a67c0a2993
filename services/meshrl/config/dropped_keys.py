"""Keys and values of earlier versions, which are ignored or replaced, so that old runs stay readable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshrl.common.checks import Loc


@dataclass(frozen=True, slots=True)
class Dropped:
    """A key that is ignored."""

    held: Any
    """Its default, which still holds; of a section, the defaults of its keys."""
    instead: str
    """The value that holds, or the key to set in its place."""

    def changes(self, value: Any) -> bool:
        """Whether a recipe with this value meant something else than what holds now."""
        if isinstance(self.held, dict) and isinstance(value, dict):
            return any(key not in self.held or self.held[key] != value[key] for key in value)
        return bool(value != self.held)


DROPPED_KEYS: Final[Mapping[Loc, Dropped]] = {
    ("actor", "conventions"): Dropped("meshrl", "set algorithm.conventions"),
    ("actor", "policy_loss", "rollout_correction"): Dropped(
        {
            "rollout_is": None,
            "rollout_is_threshold": 2.0,
            "rollout_is_batch_normalize": False,
            "rollout_rs": None,
            "rollout_rs_threshold": None,
            "bypass_mode": False,
            "loss_type": "ppo_clip",
            "second_moment_threshold": None,
            "proximal": "recompute",
        },
        "set algorithm.rollout_correction",
    ),
    ("algorithm", "distillation", "discount"): Dropped(0.0, "each token answers for itself"),
    ("algorithm", "otb_handle_zero_tail"): Dropped(
        True, "the second longest row of a group is the last that has a baseline"
    ),
    ("algorithm", "prime", "optim", "betas"): Dropped([0.9, 0.999], "0.9 and 0.999"),
    ("algorithm", "prime", "optim", "eps"): Dropped(1e-8, "1e-8"),
    ("algorithm", "prime", "optim", "lr_decay_steps"): Dropped(None, "the rate is constant"),
    ("algorithm", "prime", "optim", "lr_scheduler_type"): Dropped(
        "constant", "the rate is constant"
    ),
    ("algorithm", "prime", "optim", "lr_warmup_init_ratio"): Dropped(0.0, "there is no warm-up"),
    ("algorithm", "prime", "optim", "lr_warmup_steps"): Dropped(0, "there is no warm-up"),
    ("algorithm", "prime", "optim", "min_lr_ratio"): Dropped(0.0, "the rate is constant"),
    ("algorithm", "prime", "optim", "name"): Dropped("adamw", "AdamW"),
    ("algorithm", "prime", "optim", "offload"): Dropped(False, "its state stays on the device"),
    ("algorithm", "vapo", "lam_critic"): Dropped(
        1.0, "the critic learns returns with a lambda of 1"
    ),
    ("data", "media_inline_bytes"): Dropped(
        32 << 20, "pictures of one prompt, or one row, have 32 MiB at most"
    ),
    ("data", "media_store"): Dropped(
        None, "pictures travel with their prompt or row, of 32 MiB at most"
    ),
    ("data", "reasoning_gym", "curriculum", "lower_at"): Dropped(None, "a level never falls"),
    ("placement", "turn_wait_s"): Dropped(900.0, "900 s"),
    ("policy_loss", "rollout_correction"): Dropped(None, "meshrl dpo has no rollouts to correct"),
    ("queue", "cache_bytes"): Dropped(
        512 << 20, "512 MiB of frames that were just written are kept in RAM"
    ),
    ("queue", "compression_dictionary"): Dropped(
        None, "payload is compressed without a dictionary"
    ),
    ("queue", "grow_bytes"): Dropped(256 << 20, "the disk store grows by itself"),
    ("queue", "local_socket"): Dropped(True, "payload always travels over gRPC"),
    ("queue", "logprob_precision"): Dropped("fp32", "log-probs are float32"),
    ("queue", "memory_bytes"): Dropped(0, "the memory store keeps all payload in RAM"),
    ("queue", "quota"): Dropped(
        {
            "runs": 1000,
            "stages": 64,
            "group_rows": 16384,
            "lease_rows": 65536,
            "resident_rows": 4000000,
            "resident_bytes": 1 << 40,
            "dead_letters": 100000,
            "dead_letter_bytes": 1 << 30,
        },
        "1,000 runs, each of 4,000,000 rows and 1 TiB that wait",
    ),
    ("queue", "resident_tokens"): Dropped(0, "set queue.resident_bytes"),
    ("queue", "shards"): Dropped(1, "a queue is one process"),
    ("queue", "shared_bytes"): Dropped(512 << 20, "payload always travels over gRPC"),
    ("queue", "shared_memory_bytes"): Dropped(None, "payload always travels over gRPC"),
    ("reference", "deterministic"): Dropped(None, "exactly where queue.max_staleness is 0"),
    ("reward", "batch_size"): Dropped(64, "64 samples"),
    ("reward", "cpu_limit_s"): Dropped(None, "set reward.deadline_s"),
    ("reward", "limits", "cpu_s"): Dropped(
        None, "set reward.deadline_s; a submission may ask for cpu_s"
    ),
    ("reward", "limits", "open_files"): Dropped(64, "64 files"),
    ("reward", "limits", "output_bytes"): Dropped(8 << 20, "8 MiB"),
    ("reward", "limits", "start_deadline_s"): Dropped(30.0, "30 s"),
    ("reward", "limits", "tmp_bytes"): Dropped(64 << 20, "64 MiB"),
    ("reward", "memory_limit_bytes"): Dropped(None, "set reward.limits.memory_bytes"),
    ("reward", "registry", "keep_samples"): Dropped(4096, "4096 samples"),
    ("reward", "registry", "max_request_bytes"): Dropped(32 << 20, "32 MiB"),
    ("reward", "registry", "max_source_bytes"): Dropped(1 << 20, "1 MiB"),
    ("reward", "registry", "max_tests"): Dropped(256, "256 tests"),
    ("reward", "registry", "max_unpacked_bytes"): Dropped(64 << 20, "64 MiB"),
    ("reward", "registry", "max_versions"): Dropped(1000, "1,000 versions"),
    ("reward", "registry", "max_wheel_bytes"): Dropped(16 << 20, "16 MiB"),
    ("reward", "registry", "requests_per_minute"): Dropped(1200.0, "1,200 requests a minute"),
    ("reward", "registry", "submissions_per_minute"): Dropped(60.0, "60 submissions a minute"),
    ("reward", "rows_per_call"): Dropped(16, "16 rows a call"),
    ("reward", "slots"): Dropped(256, "256 rows at once"),
    ("reward", "start_deadline_s"): Dropped(60.0, "60 s"),
    ("reward", "wheelhouse"): Dropped(
        None, "dependencies of submitted functions are installed beside the reward service"
    ),
    ("rollout", "breaker"): Dropped(
        {"error_rate": 0.5, "window": 20, "pause_s": 0.5, "longest_pause_s": 30.0},
        "half of 20 requests, and pauses of 0.5 to 30 s",
    ),
    ("rollout", "gateway", "claims_per_minute"): Dropped(6000.0, "6000 requests a minute"),
    ("rollout", "gateway", "max_connections"): Dropped(4096, "4096 connections"),
    ("rollout", "journal_ms"): Dropped(
        1000, "tokens of running responses are saved after at most 1 s"
    ),
    ("run", "log_keep"): Dropped(4, "4 older files"),
    ("run", "log_max_bytes"): Dropped(16 << 20, "16 MiB a file"),
    ("trainer", "metrics_max_bytes"): Dropped(64 << 20, "64 MiB"),
    ("trainer", "parallel", "data_shard"): Dropped(None, "as many ranks as the others leave"),
    ("trainer", "parallel", "sequence"): Dropped(None, "set model.ulysses_sequence_parallel_size"),
    ("trainer", "profile_steps"): Dropped([2], "the third step after each start"),
    ("trainer", "take_wait_s"): Dropped(30.0, "30 s"),
    ("weights", "adapters_only"): Dropped(True, "adapters of a policy with LoRA travel alone"),
    ("weights", "among"): Dropped(
        ["cuda_ipc", "shm", "nccl", "gloo", "delta"],
        "weights.carrier auto takes shm, nccl, disk or gloo by a rule",
    ),
    ("weights", "bases"): Dropped(
        2, "the trainer keeps two older versions for weights.carrier delta"
    ),
    ("weights", "beat_s"): Dropped(2.0, "it follows from weights.silence_s and weights.base_s"),
    ("weights", "commit_s"): Dropped(
        60.0, "it is six times weights.base_s, and more for large versions"
    ),
    ("weights", "ipc", "device"): Dropped(0, "the first CUDA device that the trainer sees"),
    ("weights", "late_s"): Dropped(1.0, "stragglers have at least a second"),
    ("weights", "max_density"): Dropped(
        0.15, "a bucket of which more than 15 % has changed goes whole"
    ),
    ("weights", "nccl", "device"): Dropped(0, "set weights.nccl.env: {CUDA_VISIBLE_DEVICES: ...}"),
    ("weights", "nccl", "spare"): Dropped(True, "one process is kept in reserve"),
    ("weights", "nccl", "start_s"): Dropped(60.0, "a process of NCCL has 60 s to find its GPU"),
    ("weights", "quorum"): Dropped(
        1.0, "a version waits for all replicas, and after a while for weights.late_quorum of them"
    ),
    ("weights", "ready_s"): Dropped(30.0, "it is three times weights.base_s"),
    ("weights", "resends"): Dropped(2, "what arrives corrupted is sent again twice"),
}
"""Keys of earlier versions, and what holds instead."""
REPLACED_VALUES: Final[Mapping[Loc, Mapping[object, object]]] = {
    ("queue", "durability"): {"everysec": "always"},
    ("weights", "carrier"): {"object": "disk"},
}
"""Values of earlier versions, and what replaces them."""
