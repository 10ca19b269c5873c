"""`gradwire_hook` and its `GradwireState`: the way in for DistributedDataParallel."""
