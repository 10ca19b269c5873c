"""What builds on gradwire and serves one framework or one paper."""
