"""A coarse mesh in virtual time, and the splits of GPUs that `meshrl plan` tries on it."""
