"""Senders of `rollout.engine.update: native`, by engine; SGLang's imports torch, so its engine imports it late."""
