"""The reward service's registry for callers elsewhere: who may call, the desk behind both doors, the HTTP door."""
