"""Stand-ins for GPU memory; `weights.ipc.device` may name them."""
