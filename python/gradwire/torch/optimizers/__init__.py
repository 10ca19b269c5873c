"""Optimizers that exchange gradients or model changes without DistributedDataParallel."""
