"""The lossless sparse codec of the weight plane: what changed between two versions of a bucket, in few bytes.

Pure numpy and zstd; knows nothing of coordinators, carriers or files. `words.py`: which floating-point words differ
and by how much; `indices.py`: where they are, as bytes; `patch.py`: the container; `codec.py`: encode and apply.
"""

from meshrl.weights.delta.codec import apply, encode, encode_sparse, whole
from meshrl.weights.delta.patch import Head, head

__all__ = ["Head", "apply", "encode", "encode_sparse", "head", "whole"]
