"""One file per NCCL that a process can call; the file name is `weights.nccl.library`."""
