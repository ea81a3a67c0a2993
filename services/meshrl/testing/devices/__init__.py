"""Stand-ins for GPU memory; `weights.ipc.library` may name them."""
