"""A kill campaign against a running queue, and the checker that reads what everybody saw of it.

python -m tests.chaos.campaign --seed 1 --kills 200

plan.py       what a campaign is: its folder, its seed, its run
actors.py     feeder, producers, annotator, consumer: each a few lines on the Queue port
recorded.py   a queue that writes down every question and every answer
service.py    the queue itself, behind its servicer
processes.py  actors as processes that can be killed and started in milliseconds
faults.py     kill, pause, cut network, full disk
redis.py      the server of the redis store, one victim more
history.py    is each row's life a legal path, and is the ledger exact?
bugs.py       queues that are wrong on purpose: the checker must find each
driver.py     start everybody, strike, wait for the end, check
"""
