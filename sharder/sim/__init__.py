"""Simulated robots: recorded demonstrations, and policies in closed loop. Needs the extra `sim`."""
