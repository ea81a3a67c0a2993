"""One gRPC client per port. A client implements the same Protocol as the remote object."""
