"""ekiden: serve large language models with prefill and decode on separate pools.

This package holds what every service shares. It imports nothing by itself, so that
``import ekiden`` stays cheap in a gateway that has no torch installed.
"""

__version__ = "0.1.0"
