"""The lossless sparse codec of the weight plane: what changed between two versions of a bucket, in few bytes.

Pure numpy and zstd; knows nothing of planes, carriers or files. `words.py` differences of floating-point words,
`scan.py` which words differ, `gaps.py` where they lie as bytes, `patch.py` the container, `codec.py` the verbs.
"""

from meshrl.weights.delta.codec import apply, encode, encode_sparse, whole
from meshrl.weights.delta.patch import Head, head

__all__ = ["Head", "apply", "encode", "encode_sparse", "head", "whole"]
