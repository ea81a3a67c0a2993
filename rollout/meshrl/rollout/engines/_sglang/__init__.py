"""The parts of the `sglang` engine that are SGLang's own: its HTTP routes, its start, the loader in its workers."""
