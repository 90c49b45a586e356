"""Sharder: training of vision-language-action and language models in JAX, with the same bits on any machine.

Importing this package loads neither jax nor numpy.
"""

__version__ = "0.1.0"


def __getattr__(name: str):
    if name in ("quick", "Session"):
        from sharder import session

        return getattr(session, name)
    raise AttributeError(f"module 'sharder' has no attribute {name!r}")
