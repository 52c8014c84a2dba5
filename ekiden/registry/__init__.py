"""Replicas and their figures in Redis: register, renew, watch.

Holds nothing that cannot be rebuilt. No torch, no routing decisions.
"""
