"""How the next token is chosen. Imports no jax, so that the command line may show its defaults at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8
    """0: always the most likely token."""
    top_k: int = 50
    """Choose among this many most likely tokens; 0: among all."""
    seed: int = 0
