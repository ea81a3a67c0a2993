"""Promises that every engine and every queue must keep, as tests to inherit. They want pytest."""
