"""Reward functions submitted to a running mesh: versions, the names that point to them, the judges that run them."""
