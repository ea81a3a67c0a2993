"""One file per NCCL that a process can speak through; the file name is `weights.nccl.library`."""
