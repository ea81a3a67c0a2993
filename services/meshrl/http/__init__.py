"""HTTP servers: the gateway for agents, and the reward registry."""
