"""The exchange of gradients that lie on a GPU."""
