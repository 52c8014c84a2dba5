"""What ails a deployment: symptoms, the evidence for them, their cause and their remedy.

Reads what services tell of themselves (metrics, records in the registry, results of a bench) and
nothing else: no torch, and no service is imported.
"""
