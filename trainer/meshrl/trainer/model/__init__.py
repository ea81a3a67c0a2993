"""Models under FSDP2: packed attention, log-probs, adapters, sequence parallelism."""
