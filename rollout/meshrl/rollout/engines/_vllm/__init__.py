"""Parts of the `vllm` engine: the sender of `update: native`, and the plugin that runs in vLLM's workers."""
