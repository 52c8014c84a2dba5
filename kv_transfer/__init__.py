"""The KV hand-off: layout match (reshard), the hand-off session and the transports.

Knows cache layouts and bytes; knows nothing of models, HTTP or scheduling.
"""
