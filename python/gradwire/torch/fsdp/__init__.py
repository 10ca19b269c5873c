"""Compressed communication for models that `fully_shard` (FSDP2) has sharded."""
