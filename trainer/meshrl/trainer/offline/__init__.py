"""Training on rows that exist already: supervised fine-tuning, preferences, reward models."""
