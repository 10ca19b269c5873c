"""Data-parallel training under a limited bandwidth: what `gradwire train` runs.

run.py leads from the settings to the report. Importing this package imports neither PyTorch nor
matplotlib.
"""
