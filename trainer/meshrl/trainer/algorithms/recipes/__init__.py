"""Algorithms by name, one file each: the settings that its paper describes. See `meshrl.trainer.algorithms.named`."""
