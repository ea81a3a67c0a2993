"""HTTP: the gateway for agents, and the reward registry."""
