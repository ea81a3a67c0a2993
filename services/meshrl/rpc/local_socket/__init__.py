"""Calls with payload between processes of one machine: past gRPC, into the same handlers.

    gRPC, always         one answer names the socket ──▶ later calls with payload      LocalSocket (client.py)
    the socket           head ▸ messages ▸ end  ══▶  the handlers of gRPC, inside the same interceptors (server.py)
                                                ◀══  messages ▸ end

A megabyte costs gRPC's two ends some 800 us of processor time, those of a unix socket 150 (benchmarks/RESULTS.md).
Frames from 128 KiB on lie in memory that both ends map (shared_memory.py, mapped_memory.py): messages refer there.
Whoever cannot reach the socket (another machine, container or user, an older release) goes on over gRPC.
"""
