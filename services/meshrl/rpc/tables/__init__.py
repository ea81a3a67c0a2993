"""One table per service: a row for each method."""
