"""The settings, statistics, residuals and checkpoints of a training.

Nothing here communicates.
"""
