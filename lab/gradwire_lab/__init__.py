"""The laboratory of gradwire: trains behind slow links, plans, simulates, evaluates, measures."""
