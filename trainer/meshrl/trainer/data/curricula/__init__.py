"""Orders of an epoch, one file each: `order(prompts, epoch, seed)` gives each place once."""
