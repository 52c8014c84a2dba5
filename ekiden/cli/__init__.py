"""The ``ekiden`` command: up, serve, chat, verify, audit, models.

Imports lazily, so that ``ekiden --help`` answers at once. No logic that a library user would miss.
"""
