"""The scheduler: which tokens of which requests each iteration computes (Orca, OSDI'22).

Nothing here imports jax, so the same code runs in front of devices and in a simulation of them.
"""
