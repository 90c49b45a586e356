"""A process that ends with its parent, however that ends. Linux; standard library only."""

import ctypes
import faulthandler
import os
import signal

PARENT = "SHARDER_PARENT"
"""Of a supervisor's workers and all that they start: `PROCESS.TOKEN`, its process id and a word that no other launch has."""

STACKS_SIGNAL = signal.SIGUSR1
"""Asks a worker to print the Python stacks of its threads to standard error, also while its threads are stuck."""

PR_SET_PDEATHSIG = 1


def hold(environ: dict[str, str]) -> None:
    """Ends this process when the supervisor named in `environ` ends; no-op where none is named.

    The kernel's notice is asked for first and the parent looked at then, so that none can die in between unnoticed.
    """
    parent = environ.get(PARENT)
    if not parent:
        return
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent.split(".")[0]):
        os._exit(1)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
