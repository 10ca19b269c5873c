"""Runs the exchange of every bucket, from the first to the last, beside the training."""
