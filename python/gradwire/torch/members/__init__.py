"""Who takes part in a training whose processes come and go. Nothing here knows a model."""
