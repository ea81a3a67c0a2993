"""The gRPC layer: servicers, clients, errors, security, and the life of a service."""
