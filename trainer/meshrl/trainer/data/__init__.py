"""Rows in files become prompts, prompts become tasks: reading, chat template, length limits, the feeder."""
