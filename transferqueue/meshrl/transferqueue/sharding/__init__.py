"""Several queues as one: where a task lives, what a shard tells of itself, the queue that speaks for all of them."""
