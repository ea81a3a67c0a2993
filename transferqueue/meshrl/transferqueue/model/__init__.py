"""What the queue knows of its runs: groups, rows by state, the ledger. Transitions are synchronous."""
