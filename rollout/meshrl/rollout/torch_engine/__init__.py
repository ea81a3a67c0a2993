"""The plain-torch decoder behind the `torch` engine: weights, cache, forward pass, sampling, batch."""
