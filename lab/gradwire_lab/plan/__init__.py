"""A model of time: what a training step takes with each codec and exchange.

profile.py     what a step computes, layer by layer, and what codecs and messages cost
recorder.py    measures a model's step, for a profile
measure.py     makes the profile of a model of `gradwire train` on this machine
links.py       measures the links between ranks
trial.py       real steps of a training, with an exchange and without one
fit.py         fits the costs of a profile to them
here.py        the plan for the program that asks for it
cluster.py     the network: ranks, machines, bandwidth, latency
costs.py       messages, bytes and values of each exchange (alpha, beta, gamma)
tokens.py      what a link saves that passes a burst of bytes at once
predict.py     the time of a step in which buckets are exchanged during the backward pass
waiting.py     how long ranks wait for the exchanges of local steps
advise.py      all predictions, and which of them to take
print_plan.py  a plan as a table
simulate.py    the exchanges themselves on a simulated network
"""
