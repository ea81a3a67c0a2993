"""The whole mesh in one deterministic process, in virtual time. README.md says what is simulated and what is not."""
