"""One optimizer step: from the rows of a batch to new weights and metrics."""
