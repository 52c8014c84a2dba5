"""What is checked before a replica serves, each thing by a function that returns one line.

Looks at this machine, at Redis and at what replicas say of themselves; starts nothing, loads
nothing, and imports torch in a process of its own only.
"""
