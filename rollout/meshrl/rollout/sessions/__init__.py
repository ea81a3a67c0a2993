"""Conversations that somebody else leads: a client asks as it would ask any model, and what is sampled is a row.

    asks       what a client asks, and what it is answered
    visible    what a client sees of a response: text up to a stop string, tool calls
    calls      tool calls in the policy's words, and in the client's
    history    which recorded response a request goes on from
    asking     one answer on its way
    session    one row: asks in, a trajectory out
    agents     who leads the conversation: a function, or a command

HTTP is not here: `meshrl.http.gateway` is the door.
"""
