"""Refine a strategy: local moves on what is not locked, each proved and priced."""
