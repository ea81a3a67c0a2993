"""A server with SGLang's routes, bodies and failure answers, and no model.

`python -m meshrl.testing.sglang_server` takes the arguments of `sglang.launch_server`, so a fleet can be
rehearsed where there is no GPU. Every token and log-prob it gives tells which weights it was sampled with and which
weights its cache was computed with: a wrong label is seen. `POST /fake/fault` makes it fail.
"""
