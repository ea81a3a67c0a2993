"""Stand-ins for NCCL; `weights.nccl.library` may name them."""
