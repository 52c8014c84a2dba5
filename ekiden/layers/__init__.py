"""Layers that own their sharding and load only their slice of a checkpoint.

Written as for one device; the mesh is passed in. No model names, no scheduling.
"""
