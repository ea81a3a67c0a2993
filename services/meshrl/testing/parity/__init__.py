"""Compares the algorithms with recorded inputs and outputs of verl: `python -m meshrl.testing.parity DIR`."""
