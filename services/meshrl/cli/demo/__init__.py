"""`meshrl demo`: a tiny model learns by RL that thinking pays, with every service a process of its own."""
