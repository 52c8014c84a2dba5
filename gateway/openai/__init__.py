"""OpenAI's HTTP surface: what a body may say, and the exact shape of every answer.

No sockets, no replicas, no routing.
"""
