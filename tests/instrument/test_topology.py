import dataclasses
import json
from importlib import util

import pytest
from small import sharder, small

from sharder.config import ParallelConfig, UserError
from sharder.instrument import topology
from sharder.instrument.hardware import ACCELERATORS
from sharder.instrument.topology import GPUS, cuda_target, parse_topology
from sharder.models.build import declare
from sharder.recipes import load_recipe
from sharder.train.planning import check_here, check_topology

needs_cuda = pytest.mark.skipif(
    not util.find_spec("jax_plugins") or not util.find_spec("jax_plugins.xla_cuda12"),
    reason="the extra plan-cuda is not installed",
)
needs_tpu = pytest.mark.skipif(not util.find_spec("libtpu"), reason="the extra plan-tpu is not installed")


def test_a_machine_has_hosts_and_devices():
    machine = parse_topology("h100:32x8")
    assert (machine.num_devices, machine.devices_per_host, str(machine)) == (256, 8, "h100:32x8")
    assert (parse_topology("v5e:16x16").num_devices, parse_topology("v5e:16x16").devices_per_host) == (256, 8)


@pytest.mark.parametrize(
    "text", ["h100", "h100:", "h100:8", "h100:0x8", "h100:2x2x2", "v5p:4x4", "v5e:4x4x4", "h300:1x8", "h100:1x8x"]
)
def test_what_is_no_machine_is_refused_with_an_example(text):
    with pytest.raises(UserError, match=r"--topology is '.*(h100:32x8|for example)"):
        parse_topology(text)


@pytest.mark.parametrize("name", GPUS)
def test_a_target_has_the_memory_of_the_hardware_table(name):
    assert f"device_memory_size: {ACCELERATORS[name].memory_bytes} " in cuda_target(ACCELERATORS[name])


@pytest.mark.parametrize("name, extra", [("h100:1x8", "plan-cuda"), ("v5e:2x4", "plan-tpu")])
def test_without_its_compiler_a_machine_is_planned_from_shapes_alone(monkeypatch, capsys, name, extra):
    find = topology.util.find_spec
    missing = ("jax_plugins", "libtpu")
    monkeypatch.setattr(topology.util, "find_spec", lambda name, *more: None if name in missing else find(name, *more))
    config = dataclasses.replace(small(), parallel=ParallelConfig(policy="fsdp", reduction="fast"))
    assert check_topology(config, name, find=False) == 0
    out = capsys.readouterr().out
    assert f"pip install 'sharder-jax[{extra}]'" in out and "predicted from shapes alone" in out
    assert "fits: " in out and "would fit, by prediction" in out


def test_degrees_that_the_devices_cannot_form_have_a_way_to_be_planned(capsys):
    config = dataclasses.replace(small(), parallel=ParallelConfig(policy="fsdp", fsdp=16))
    with pytest.raises(UserError, match="16 devices, but there are 8"):
        check_here(config, compiles=False)
    assert "16 devices that are not here: --topology h100:1x16, or --cluster.cpu-devices 16" in capsys.readouterr().out


def by_hand() -> tuple[int, int, int]:
    """Of gpt with fsdp, elements of all blocks, of the token table, and of the rest outside of blocks.

    D 768, F 3072, 12 layers, 1024 positions, 50432 tokens; the biases of q, k and v stay whole on 256 devices and are left out.
    """
    D, F, layers = 768, 3072, 12
    block = 4 * D * D + 2 * D * F + 6 * D + F  # projections, feed-forward, norms and the biases that are divided
    return layers * block, 50432 * D, 1024 * D + 2 * D


def traffic_of(name: str, home) -> dict:
    arguments = ("check", "gpt", "--parallel.policy", "fsdp", "--topology", name, "--report", home / "found.json")
    ran = sharder(*arguments, HOME=str(home), timeout=1800)
    assert ran.returncode == 0, ran.stderr
    return json.loads((home / "found.json").read_text())["traffic"]


@needs_cuda
@pytest.mark.slow
def test_a_step_for_256_gpus_moves_what_a_hand_calculation_says(tmp_path):
    blocks, table, rest = by_hand()
    traffic = traffic_of("h100:32x8", tmp_path)
    # In bfloat16: blocks in both passes, table and rest once.
    assert traffic["gathered_bytes"] == pytest.approx(2 * (2 * blocks + table + rest), rel=1e-3)
    # In float32, the table once for both of its uses.
    assert traffic["reduced_bytes"] == pytest.approx(4 * (blocks + table + rest), rel=1e-3)


@needs_tpu
@pytest.mark.slow
def test_a_step_for_256_tpus_moves_what_a_hand_calculation_says(tmp_path):
    blocks, table, rest = by_hand()
    traffic = traffic_of("v5e:16x16", tmp_path)
    assert traffic["gathered_bytes"] == pytest.approx(2 * (2 * blocks + table + rest), rel=1e-3)
    assert traffic["reduced_bytes"] == pytest.approx(4 * (blocks + table + rest), rel=1e-3)


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("recipe, batch, policy", [("tiny_lm", 256, "zero"), ("gpt", 64, "fsdp"), ("gpt", 64, "dp")])
def test_the_total_for_a_gpu_is_within_a_tenth_of_the_compiled(tmp_path, recipe, batch, policy):
    options = (
        "--parallel.policy",
        policy,
        "--train.global-batch-size",
        batch,
        "--topology",
        "h100:1x8",
        "--report",
        tmp_path / "found.json",
    )
    ran = sharder("check", recipe, *options, HOME=str(tmp_path), timeout=1800)
    assert ran.returncode == 0, ran.stderr
    memory = json.loads((tmp_path / "found.json").read_text())["memory"]
    assert memory["total"] == pytest.approx(memory["compiled"], rel=0.1)


@needs_cuda
@pytest.mark.slow
def test_a_step_for_two_hosts_of_gpus_crosses_them_with_what_a_hand_calculation_says(tmp_path):
    options = ("--parallel.policy", "fsdp", "--parallel.data", 2, "--parallel.fsdp", 4, "--train.global-batch-size", 64)
    ran = sharder(
        "check",
        "tiny_lm",
        *options,
        "--topology",
        "h100:2x4",
        "--report",
        tmp_path / "found.json",
        HOME=str(tmp_path),
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    quarter = 4 * declare(load_recipe("tiny_lm").model).num_params / 4
    assert found["bounds"]["reduce gradients"]["across_program"] == pytest.approx(quarter, rel=0.02)
    assert found["bounds"]["gather parameters"]["across_program"] < 1 << 10 < found["bounds"]["gather parameters"]["program"]
    assert found["traffic"]["across_bytes"] == pytest.approx(quarter, rel=0.02)
