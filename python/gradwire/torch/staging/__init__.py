"""Where the engine finds the values of a model, whatever device they are on."""
