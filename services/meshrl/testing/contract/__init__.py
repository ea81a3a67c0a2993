"""What every engine and every queue must keep of its port, as tests to inherit. They want pytest."""
