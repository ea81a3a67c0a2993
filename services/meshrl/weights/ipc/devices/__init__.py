"""One file per library that shares device memory; the file name is `weights.ipc.library`."""
