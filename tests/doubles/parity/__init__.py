"""Compares the algorithms with recorded inputs and outputs of verl: `python -m tests.doubles.parity DIR`."""
