"""Checkpoints in torch.distributed.checkpoint, and of another number of ranks."""
