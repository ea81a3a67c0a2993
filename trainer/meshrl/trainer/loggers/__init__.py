"""Destinations of metrics beside metrics.jsonl, one file each: the file name is the name in `trainer.logger`."""
