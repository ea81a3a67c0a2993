"""One gRPC servicer per service. It translates and delegates; it has no state and no `try`."""
