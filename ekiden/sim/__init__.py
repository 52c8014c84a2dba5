"""A discrete-event simulator: the gateway's router and the engine's scheduler over modelled steps.

Imports the gateway's pure placing, ``ekiden.engine.scheduling`` and the planner. No service, no
socket, no sleep, no torch: time is what ``loop`` says, and chance comes from one seed.
"""
