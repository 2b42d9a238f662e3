"""Curvature of each task's loss: measured once, stored, used for every merge."""
