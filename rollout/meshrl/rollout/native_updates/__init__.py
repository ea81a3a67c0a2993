"""Senders of `rollout.engine.update: native`, by engine."""
