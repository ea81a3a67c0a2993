"""The queue's state of its runs: groups, rows by state, the ledger. Transitions are synchronous."""
