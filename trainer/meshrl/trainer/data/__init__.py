"""From rows in files to prompts and tasks: readers, chat template, length limits, the feeder."""
