"""A store in memory that fails when it is told to."""

from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem


class Flaky(MemoryFileSystem):
    """Fails every operation that reads or changes a file, so many times as `failures` says."""

    protocol = "flaky"
    store, pseudo_dirs, failures = {}, [""], 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def _fail(self):
        if Flaky.failures:
            Flaky.failures -= 1
            raise ConnectionError("503 try again")

    def put_file(self, *arguments, **options):
        self._fail()
        return super().put_file(*arguments, **options)

    def get_file(self, *arguments, **options):
        self._fail()
        return super().get_file(*arguments, **options)

    def cat_file(self, *arguments, **options):
        self._fail()
        return super().cat_file(*arguments, **options)

    def pipe_file(self, *arguments, **options):
        self._fail()
        return super().pipe_file(*arguments, **options)


register_implementation("flaky", Flaky, clobber=True)


def empty(monkeypatch) -> str:
    """An address in an empty store that works, without pauses between tries."""
    from sharder.checkpoint import mirror

    monkeypatch.setattr(Flaky, "store", {})
    monkeypatch.setattr(Flaky, "pseudo_dirs", [""])
    monkeypatch.setattr(Flaky, "failures", 0)
    monkeypatch.setattr(mirror, "FIRST_DELAY_S", 0.0)
    return "flaky://bucket/run"
