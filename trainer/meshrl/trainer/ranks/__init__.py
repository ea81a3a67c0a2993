"""The processes of one trainer, and the thread that computes."""
