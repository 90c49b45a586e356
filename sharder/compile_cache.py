"""jax's persistent compilation cache, for every process of a run on CPU.

jax lets process 0 alone write, since on accelerators all processes share an entry. On CPU they do not (the key covers the
process's own devices), so that every other process would compile anew at each start, and process 0 wait for it: 5 s of a
restart of two processes (measured). There each process writes its own entries. A private interface of jax (0.10); where it has
changed the cache stays as jax has it.
"""

import types


def write_in_every_process() -> bool:
    """Call it before anything is compiled; returns whether it could."""
    from jax._src import compiler

    write = getattr(compiler, "_cache_write", None)
    if not isinstance(write, types.FunctionType) or "process_id" not in str(write.__code__.co_names) or write.__closure__:
        return False
    # The same code, to which every process is number 0.
    seen = vars(compiler) | {"distributed": types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))}
    compiler._cache_write = types.FunctionType(write.__code__, seen, write.__name__, write.__defaults__)
    return True
