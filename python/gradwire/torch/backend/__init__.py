"""A backend of torch.distributed that compresses collectives of any program."""
