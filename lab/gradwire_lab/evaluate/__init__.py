"""`gradwire evaluate`: the papers' evaluations, at a scale that two cores can train."""
