"""Published measurements, and how near predictions come to them."""
