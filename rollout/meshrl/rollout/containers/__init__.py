"""The containers in which agents work: one for each episode."""
