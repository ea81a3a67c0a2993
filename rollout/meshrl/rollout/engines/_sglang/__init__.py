"""Parts of the `sglang` engine: the sender of `update: native`, and the loader that runs in SGLang's workers."""
