"""Runs code that nobody trusts: sandboxes, limits, system call filters, installed dependencies."""
