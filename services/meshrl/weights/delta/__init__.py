"""The lossless sparse codec of the weight plane (`codec.py`), and what both ends keep for it (`patches.py`)."""

from meshrl.weights.delta.codec import Head, apply, encode, encode_sparse, head, whole

__all__ = ["Head", "apply", "encode", "encode_sparse", "head", "whole"]
