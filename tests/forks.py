"""Imported before grpc: its handlers of forks run in the child of a process that has channels open,
before that child becomes a service, and now and then hold it there for ever."""

from ekiden.core.env import quiet_grpc_forks

quiet_grpc_forks()
