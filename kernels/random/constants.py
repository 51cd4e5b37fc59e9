"""The multipliers of the counter hash (counter.py), for the kernels that must not import torch."""

HEAD, ROW, COLUMN = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
MIX = (0x7FEB352D, 0x846CA68B)
