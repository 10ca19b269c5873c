"""From the first bucket to the last: runs the exchange of every bucket beside the training."""
