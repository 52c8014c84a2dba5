"""The HTTP gateway: OpenAI's API, routing, and the streams to decode replicas.

Never imports torch. Routing is pure code over a snapshot and a clock.
"""
