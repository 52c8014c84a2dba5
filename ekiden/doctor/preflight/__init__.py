"""What is checked before a replica serves, each thing by a function that returns one line.

Looks at this machine, at Redis and at what replicas say of themselves. Nothing is started or
loaded here, and torch is imported in a process of its own only.
"""
