"""NCCL in processes of its own: what blocks without a deadline is where it can be killed."""
