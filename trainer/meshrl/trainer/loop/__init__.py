"""One run's loop: the next batch, a step, a version, a checkpoint, an evaluation."""
