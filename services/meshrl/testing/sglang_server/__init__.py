"""A server with SGLang's routes, bodies and failure answers, and no model.

`python -m meshrl.testing.sglang_server` takes the arguments of `sglang.launch_server`, so that a
fleet can be tested without a GPU. Every token and log-prob encodes which weights sampled it and which weights
computed its cache, so that tests find wrong version labels. `POST /fake/fault` makes it fail.
"""
