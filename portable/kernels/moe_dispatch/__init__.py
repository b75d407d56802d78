"""Kernels of the op that names this folder."""
