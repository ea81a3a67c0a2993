"""Device memory that one process lends another of its host: what `carriers/cuda_ipc.py` is made of."""
