"""`ServerOptimizer`: dedicated ranks hold the model and step it."""
