"""Test doubles and recorded cases, for our tests and for people who extend meshrl. No product code imports this."""
