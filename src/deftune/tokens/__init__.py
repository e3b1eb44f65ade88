"""A model over rows: token statistics and token tables, from one forward pass without gradients."""
