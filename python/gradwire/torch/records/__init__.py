"""What a training is set up with and what it keeps: settings, statistics, residuals, checkpoints.

Nothing here communicates.
"""
