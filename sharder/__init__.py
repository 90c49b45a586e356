"""Sharder: training of vision-language-action and language models in JAX, with the same bits on any machine.

Importing this package loads neither jax nor numpy.
"""

__version__ = "0.1.0"
