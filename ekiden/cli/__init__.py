"""The ``ekiden`` command: up, serve, models, verify, chat.

Imports lazily, so that ``ekiden --help`` answers at once. No logic that a library user would miss.
"""
