"""The store room: order, waiting, leases, staleness, ledger. Knows asyncio and numpy; no gRPC, no torch."""
