"""Simulated robots: recorded demonstrations. Needs the extra `sim`."""
