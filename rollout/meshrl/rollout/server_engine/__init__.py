"""What every engine over a stock server shares; the file of one kind of server is in `meshrl.rollout.engines`."""
