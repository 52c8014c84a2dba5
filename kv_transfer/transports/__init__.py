"""The wires KV can move over; each implements ``kv_transfer.transports.base.Transport``."""
