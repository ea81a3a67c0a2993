"""Conversations led by an agent that sends requests as to any model; what is sampled becomes a row.

requests        what a client requests, the answer it gets, and tool calls as it sees them
answer_stream   one running answer, and the part of it that a client sees
history         which recorded response a request continues; every branch as one row
session         one row: requests in, a trajectory out; the port of the HTTP endpoint (`meshrl.http.gateway`)
agent           what leads the conversation: a function, or a command
agent_server    one process that leads all conversations of a worker; `verifiers_server` is what runs in it
"""
