"""The page over run directories: curves, fleet, flow, configuration and rollouts."""
