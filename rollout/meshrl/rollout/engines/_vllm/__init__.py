"""The parts of the `vllm` engine: the checkpoint's facts, the server's process, its HTTP routes, one answer."""
