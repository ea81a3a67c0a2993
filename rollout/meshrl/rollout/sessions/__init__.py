"""Conversations led by an agent that sends requests as to any model; what is sampled becomes a row.

requests        what a client requests, and the answer it gets
visible_text    the part of a response that a client sees: text up to a stop string, tool calls
tool_calls      tool calls as the policy writes them, and as the client sees them
history         which recorded response a request continues
answer_stream   one running answer
session         one row: requests in, a trajectory out
agents          what leads the conversation: a function, or a command
gateway         the port of the HTTP endpoint; `meshrl.http.gateway` implements it
"""
