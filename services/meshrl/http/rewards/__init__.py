"""The reward service's registry over HTTP: app, models, errors, metrics."""
