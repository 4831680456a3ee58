"""Says what a strategy costs and which one is best."""
