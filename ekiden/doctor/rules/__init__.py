"""One function a symptom: from the evidence to the causes that it supports. Pure; no clock, no
network, no file. Thresholds stand in ``ekiden.doctor.thresholds``.
"""
