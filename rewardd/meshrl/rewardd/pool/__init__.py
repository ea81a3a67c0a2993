"""Scoring processes: samples in, scores out, whatever the reward functions do."""
