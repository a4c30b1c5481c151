"""Which tokens of which requests each iteration computes: the scheduler (Orca, OSDI'22) and what it decides by.

Nothing here imports jax, so the same code runs in front of devices and in a simulation of them.
"""
