"""Shared parts of engines over stock servers; `meshrl.rollout.engines` has a file for each kind of server."""
