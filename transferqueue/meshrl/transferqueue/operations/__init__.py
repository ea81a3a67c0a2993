"""What callers may do to a run: admit, lease, write, take, settle, replay; and the operator's backup and audit."""
