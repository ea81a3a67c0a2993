"""The parts of the `vllm` engine that are vLLM's own: its HTTP routes, its start, the plugin in its workers."""
