"""The HTTP API of the Tinker SDK: a client's training loop over the trainer's policies and an engine."""
