"""What a machine that is too small is told, and the search for one that is not: by prediction, which applying the options repeats."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from small import small
from small_pi0 import small_pi0

from sharder.config import MlpConfig
from sharder.finding import applied
from sharder.instrument import machine
from sharder.instrument.hardware import ACCELERATORS
from sharder.instrument.machine import fastest, fewest_devices, memory_of, predict_step, remedies
from sharder.instrument.roofline import count_work
from sharder.instrument.share import trace_share
from sharder.instrument.topology import Topology
from sharder.train.description import describe_step
from sharder.train.planning import say_fit, search

# Quickly traced, and with enough examples and layers that remat and microbatches matter.
MLP = MlpConfig(input_dim=64, hidden_dim=64, num_layers=12, output_dim=64, compute_dtype="bfloat16")
CONFIG = applied(dataclasses.replace(small(), model=MLP), {"--train.global-batch-size": 4096})


def with_options(text: str, config=CONFIG):
    words = text.split()
    return applied(config, {option: int(value) if value.isdigit() else value for option, value in zip(words[::2], words[1::2])})


def total(config, num_devices: int = 4) -> int:
    return memory_of(describe_step(config, num_devices, num_devices)).total


def h100(memory_bytes: int):
    return dataclasses.replace(ACCELERATORS["h100"], memory_bytes=memory_bytes)


@pytest.fixture(scope="module")
def step():
    return describe_step(CONFIG, 4, 4)


@pytest.fixture(scope="module")
def found(step):
    """What would make a step fit whose devices have a third of the memory that it needs."""
    return remedies(CONFIG, describe_step, step, 4, 4, memory_of(step).total // 3)


def test_a_microbatch_is_named_first_and_is_the_largest_that_fits(step, found):
    option, size = found[0].split()
    sizes = [1 << i for i in range(11)]
    fits = [m for m in sizes if total(applied(CONFIG, {option: m})) <= memory_of(step).total // 3]
    assert option == "--train.microbatch-size" and int(size) == max(fits) < 1024


def test_policies_degrees_and_remat_that_are_named_fit(step, found):
    assert (
        len(found) == 4
        and any("--model.remat block" in text for text in found)
        and all("--parallel.policy" in text for text in found[1:])
    )
    assert all(total(with_options(text)) <= memory_of(step).total // 3 for text in found)


def test_tensor_degrees_are_named_where_they_help(monkeypatch):
    config = small()
    monkeypatch.setattr(machine, "memory_of", lambda step: SimpleNamespace(total=100 // step.plan.mesh.tensor))
    found = remedies(config, describe_step, describe_step(config, 4, 4), 4, 4, 30)
    assert len(found) == 4 and all("--parallel.tensor 4" in text for text in found)


def test_the_update_of_a_step_reads_and_writes_what_is_trained_alone():
    """Parameters, moments and average of 4 + 8 + 4 bytes read and written, and gradients of 4 read."""
    config = applied(small_pi0(), {"--model.freeze": "vision", "--parallel.reduction": "fast"})
    step = describe_step(config, 1, 1)
    trained = sum(math.prod(d.shape) for path, d in step.declared.params.items() if path not in step.declared.frozen)
    share = trace_share(step.declared, step.plan, step.batch, "update")
    update = predict_step(step, None, 1).work.memory_bytes - count_work(share, 1, 0, None, "float32").memory_bytes
    assert config.train.ema_decay is not None and len(step.declared.frozen) > 5
    assert update == pytest.approx(trained * (2 * (4 + 8 + 4) + 4), rel=1e-3)


def test_where_nothing_fits_nothing_is_named(step):
    assert remedies(CONFIG, describe_step, step, 4, 4, 1000) == []


def test_a_machine_that_is_too_small_says_by_how_much_and_what_would_fit(step, capsys):
    needed = memory_of(step).total
    target = Topology(h100(needed // 3), (1, 4))
    assert say_fit(CONFIG, target, predict_step(step, target.accelerator, 4), needed) == 2
    printed = capsys.readouterr().out
    assert (
        f"{(needed - needed // 3) / 2**20:,.1f} MiB more than" in printed
        and "--train.microbatch-size" in printed.split("by prediction:")[1]
    )


def test_a_machine_that_fits_says_how_many_examples_would(step, capsys):
    limit = memory_of(dataclasses.replace(step, microbatch_size=2048)).total + 1
    target = Topology(h100(limit), (1, 4))
    assert say_fit(CONFIG, target, predict_step(step, target.accelerator, 4), memory_of(step).total) == 0
    assert "up to 2048 examples would fit, by prediction; a replica computes 1024 at once" in capsys.readouterr().out


def test_the_fewest_devices_fit_and_fewer_do_not():
    """A limit between what the best configuration needs on one device and on two."""
    least = {n: min(_totals(n)) for n in (1, 2)}
    assert least[2] < least[1]
    found = fewest_devices(CONFIG, describe_step, 1, 4, h100((least[1] + least[2]) // 2))
    assert found.num_devices == 2 and total(with_options(found.options), 2) <= (least[1] + least[2]) // 2
    assert fewest_devices(CONFIG, describe_step, 1, 4, h100(1000)) is None


def _totals(num_devices: int):
    for policy in ("fsdp", "zero", "dp"):
        yield total(
            applied(CONFIG, {"--parallel.policy": policy, "--model.remat": "block", "--train.microbatch-size": 1}), num_devices
        )


def test_the_three_fastest_are_the_first_by_prediction_of_all_that_fit():
    accelerator = h100(1 << 40)
    found = fastest(CONFIG, describe_step, 1, 4, accelerator)
    times = [f.prediction.time.exposed_s for f in found]
    every = fastest(CONFIG, describe_step, 1, 4, accelerator, count=100)
    assert (
        len(found) == len({f.options for f in found}) == 3 and times == sorted(f.prediction.time.exposed_s for f in every)[:3]
    )
    again = predict_step(describe_step(with_options(found[0].options), 4, 4), accelerator, 4)
    assert again.time.exposed_s == pytest.approx(times[0])


def test_a_search_prints_both_and_ends_with_2_where_nothing_fits(capsys):
    assert search(CONFIG, Topology(h100(1 << 40), (1, 2))) == 0
    printed = capsys.readouterr().out
    assert "fewest devices that fit, by prediction: 1 devices" in printed and printed.count("2 devices: --parallel.policy") == 3
    assert search(CONFIG, Topology(h100(1000), (1, 2))) == 2 and "nothing fits" in capsys.readouterr().out


def test_a_tpu_slice_is_one_network_so_that_its_times_are_known():
    found = fastest(CONFIG, describe_step, 2, 4, ACCELERATORS["v5e"])
    assert all(f.prediction.time is not None and f.prediction.time.across_s == 0 for f in found)
