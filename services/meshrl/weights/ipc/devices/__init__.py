"""What can lend device memory: cupy, and a stub for machines without a GPU."""
