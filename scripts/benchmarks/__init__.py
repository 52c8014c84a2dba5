"""What the benches share: results, charts, engines behind one interface. Not part of the product.

Runs as ``python -m benchmarks.NAME`` with ``scripts/`` on the path; workers of peers run in the
peer's own environment, so what they import is the standard library only.
"""
