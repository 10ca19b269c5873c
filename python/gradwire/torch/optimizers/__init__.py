"""Optimizers that exchange what they need by themselves, without DistributedDataParallel."""
