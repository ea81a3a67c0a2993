"""Metrics of a run: the log, the signs that it does not learn, utilisation and profiles."""
