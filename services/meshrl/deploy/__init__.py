"""A mesh on several machines: what starts its services there, and what clusters read to give them."""
