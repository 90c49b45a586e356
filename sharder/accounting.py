"""How a global batch is made up, and every reason why it cannot be: replicas, microbatches, virtual workers, examples there are."""

from dataclasses import dataclass

from sharder.config import RunConfig, UserError
from sharder.finding import Finding, around, either


@dataclass(frozen=True)
class Accounting:
    """How a global batch is made up: slots x replicas x microbatch_size."""

    num_replicas: int
    microbatch_size: int
    num_slots: int

    @property
    def global_batch_size(self) -> int:
        return self.num_replicas * self.microbatch_size * self.num_slots

    @property
    def slot_size(self) -> int:
        return self.num_replicas * self.microbatch_size

    def __str__(self) -> str:
        return (
            f"{self.microbatch_size} examples per replica and slot x {self.num_replicas} replicas x {self.num_slots} slots"
            f" = {self.global_batch_size} examples per step"
        )


@dataclass(frozen=True)
class WorkerAccounting(Accounting):
    """How a global batch is made up in exact mode: every slot is one virtual worker on each replica."""

    num_microbatches: int
    """Accumulation slots inside a worker."""

    @property
    def global_batch_size(self) -> int:
        return self.num_microbatches * super().global_batch_size

    @property
    def slot_size(self) -> int:
        return self.num_microbatches * super().slot_size

    def __str__(self) -> str:
        inside = f" x {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
        return (
            f"exact: {self.num_replicas * self.num_slots} virtual workers of {self.microbatch_size}{inside} examples, {self.num_slots}"
            f" on each of {self.num_replicas} replicas = {self.global_batch_size} examples per step"
        )


def account_batch(config: RunConfig, num_replicas: int) -> Accounting:
    """Raises UserError where the global batch does not divide, naming the nearest that do."""
    _raise(_slot_findings(config, num_replicas, None))
    batch, micro = config.train.global_batch_size, config.train.microbatch_size
    return Accounting(num_replicas, micro or batch // num_replicas, 1 if micro is None else batch // (num_replicas * micro))


def account_workers(config: RunConfig, num_replicas: int) -> WorkerAccounting:
    """Raises UserError where virtual workers do not fit the replicas or the batch, naming what would."""
    _raise(_worker_findings(config, num_replicas, None))
    workers, micro = config.parallel.virtual_workers, config.train.microbatch_size
    size = config.train.global_batch_size // workers
    return WorkerAccounting(num_replicas, micro or size, workers // num_replicas, size // (micro or size))


def account(config: RunConfig, num_replicas: int) -> Accounting:
    """The accounting of the run's mode."""
    return (account_workers if config.parallel.reduction == "exact" else account_batch)(config, num_replicas)


def batch_findings(config: RunConfig, num_replicas: int, num_examples: int | None = None) -> list[Finding]:
    """Why the batch of the run's mode cannot be made up from `num_examples`; None: their number is not known."""
    exact = config.parallel.reduction == "exact"
    found = (_worker_findings if exact else _slot_findings)(config, num_replicas, num_examples)
    if num_examples is not None and num_examples < config.train.global_batch_size:
        unit = config.parallel.virtual_workers if exact else num_replicas * (config.train.microbatch_size or 1)
        found.append(_too_few_examples(config, unit, num_examples))
    return found


def _raise(found: list[Finding]) -> None:
    if found:
        raise UserError(found[0].message)


def _whole_batch(batch: int, unit: int, num_examples: int | None) -> dict[str, int]:
    """The nearest batch of whole units that the dataset can fill, or the nearest of all where it cannot fill one."""
    fits = [n for n in around(batch, unit) if num_examples is None or n <= num_examples]
    return {"--train.global-batch-size": (fits or around(batch, unit))[0]}


def _slot_findings(config: RunConfig, num_replicas: int, num_examples: int | None) -> list[Finding]:
    batch, micro = config.train.global_batch_size, config.train.microbatch_size
    unit = num_replicas * (micro or 1)
    if batch % unit == 0:
        return []
    per_replica = f" x --train.microbatch-size {micro}" if micro else ""
    text = f"--train.global-batch-size is {batch}, which does not divide over {num_replicas} replicas{per_replica}: use"
    text += f" {either(around(batch, unit))}"
    if batch % num_replicas == 0:  # smaller microbatches train the same
        nearest, fits = _microbatch_that_fits(batch // num_replicas, micro)
        message = f"{text}, or --train.microbatch-size one of {fits}."
        return [Finding("batch", message, nearest, "--train.microbatch-size", factor=unit)]
    nearest = _whole_batch(batch, unit, num_examples)
    return [Finding("batch", f"{text}.", nearest, "--train.global-batch-size", factor=unit)]


def _microbatch_that_fits(size: int, micro: int) -> tuple[dict[str, int], list[int]]:
    """The microbatch nearest to `micro` that divides `size` examples, and all that do."""
    fits = [m for m in range(1, size + 1) if size % m == 0]
    return {"--train.microbatch-size": min(fits, key=lambda m: abs(m - micro))}, fits


def _worker_findings(config: RunConfig, num_replicas: int, num_examples: int | None) -> list[Finding]:
    batch, workers, micro = config.train.global_batch_size, config.parallel.virtual_workers, config.train.microbatch_size
    if workers % num_replicas and num_replicas & (num_replicas - 1):
        fits = [1 << i for i in range(num_replicas.bit_length())]
        message = f"exact mode needs a power of two of replicas, but there are {num_replicas}: use one of {fits}, or --parallel.reduction fast."
        return [
            Finding("virtual_workers", message, {"--parallel.reduction": "fast"}, "--parallel.reduction", factor=num_replicas)
        ]
    if workers % num_replicas:
        message = (
            f"--parallel.virtual-workers is {workers}, which does not divide over {num_replicas} replicas: a run of {workers} virtual"
            f" workers cannot grow beyond {workers} replicas. Use {num_replicas} or more in a new run, or fewer replicas."
        )
        nearest = {"--parallel.virtual-workers": num_replicas}
        return [Finding("virtual_workers", message, nearest, "--parallel.virtual-workers", factor=num_replicas)]
    if batch % workers:
        fits = either(around(batch, workers))
        message = f"--train.global-batch-size is {batch}, which does not divide into {workers} virtual workers: use {fits}."
        return [
            Finding("batch", message, _whole_batch(batch, workers, num_examples), "--train.global-batch-size", factor=workers)
        ]
    size = batch // workers
    if micro and size % micro:
        nearest, fits = _microbatch_that_fits(size, micro)
        message = f"--train.microbatch-size is {micro}, which does not divide the {size} examples of a virtual worker: use one of {fits}."
        return [Finding("batch", message, nearest, "--train.microbatch-size", factor=micro)]
    return []


def _too_few_examples(config: RunConfig, unit: int, num_examples: int) -> Finding:
    batch, largest = config.train.global_batch_size, num_examples // unit * unit
    head = f"the dataset has {num_examples} examples, less than one batch of {batch}"
    if largest:
        message = f"{head}: lower --train.global-batch-size to {largest} or less, or --data.seq-len, or give more data."
        return Finding("dataset", message, {"--train.global-batch-size": largest}, "--train.global-batch-size", factor=unit)
    way = f", nor one of {unit}, which is the least here: give more data, or fewer replicas and smaller microbatches."
    synthetic = config.data.source == "synthetic" or not hasattr(config.model, "vocab_size")
    nearest = {"--data.num-examples": batch} if synthetic else {}
    return Finding("dataset", head + way, nearest, "--data.num-examples" if synthetic else "--data.path", factor=unit)
