"""A mesh on several machines: what starts its services there, and what Slurm and Kubernetes read."""
