"""Attention kernels, one file a kind of device, behind one signature."""
