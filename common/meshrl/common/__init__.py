"""Helpers without a subject of their own: files, sockets, processes, plug-ins, options, traces."""
