from importlib import util

import pytest
from small import sharder

from sharder.config import UserError
from sharder.instrument.hardware import ACCELERATORS
from sharder.instrument.topology import GPUS, cuda_target, parse_topology

needs_cuda = pytest.mark.skipif(
    not util.find_spec("jax_plugins") or not util.find_spec("jax_plugins.xla_cuda12"), reason="the extra plan-cuda is not installed"
)
needs_tpu = pytest.mark.skipif(not util.find_spec("libtpu"), reason="the extra plan-tpu is not installed")


def test_a_machine_has_hosts_and_devices():
    machine = parse_topology("h100:32x8")
    assert (machine.num_devices, machine.devices_per_host, str(machine)) == (256, 8, "h100:32x8")
    assert (parse_topology("v5e:16x16").num_devices, parse_topology("v5e:16x16").devices_per_host) == (256, 8)


@pytest.mark.parametrize("text", ["h100", "h100:", "h100:8", "h100:0x8", "h100:2x2x2", "v5p:4x4", "v5e:4x4x4", "h300:1x8", "h100:1x8x"])
def test_what_is_no_machine_is_refused_with_an_example(text):
    with pytest.raises(UserError, match=r"--topology is '.*(h100:32x8|for example)"):
        parse_topology(text)


@pytest.mark.parametrize("name", GPUS)
def test_a_target_has_the_memory_of_the_hardware_table(name):
    assert f"device_memory_size: {ACCELERATORS[name].memory_bytes} " in cuda_target(ACCELERATORS[name])


def test_a_missing_compiler_is_one_line_that_says_how_to_install_it(monkeypatch):
    from sharder.instrument import topology

    monkeypatch.setattr(topology.util, "find_spec", lambda name: None)
    for name, extra in (("h100:1x8", "plan-cuda"), ("v5e:2x2", "plan-tpu")):
        with pytest.raises(UserError, match=rf"^[^\n]*pip install 'sharder-jax\[{extra}\]'$"):
            topology.open_devices(parse_topology(name))


def gathered_and_reduced(num_devices: int) -> tuple[int, int]:
    """Of gpt with fsdp, bytes in bfloat16 by hand: D 768, F 3072, 12 heads of 64, 12 layers, 1024 positions, 50432 tokens.

    The biases of q, k and v (64 along head_dim) stay whole on 256 devices.
    """
    D, F, layers = 768, 3072, 12
    block = 4 * D * D + 2 * D * F + 4 * D + 2 * D + F  # projections, feed-forward, norms, biases that are divided
    outside = 50432 * D + 1024 * D + 2 * D  # tokens, positions, the last norm
    return 2 * (2 * layers * block + outside), 2 * (layers * (block + 3 * D) + outside)


@needs_cuda
@pytest.mark.slow
def test_a_step_for_256_gpus_moves_what_a_hand_calculation_says(tmp_path):
    import json

    ran = sharder("check", "gpt", "--parallel.policy", "fsdp", "--topology", "h100:32x8", "--report", tmp_path / "found.json", HOME=str(tmp_path), timeout=900)
    assert ran.returncode == 0, ran.stderr
    traffic = json.loads((tmp_path / "found.json").read_text())["traffic"]
    gathered, reduced = gathered_and_reduced(256)
    assert traffic["gathered_bytes"] == pytest.approx(gathered, rel=0.02)
    # Some of the gradients travel in float32: never fewer bytes than in bfloat16, never more than twice.
    assert reduced <= traffic["reduced_bytes"] <= 2 * reduced


@needs_tpu
@pytest.mark.slow
def test_a_step_for_256_tpus_moves_what_a_hand_calculation_says(tmp_path):
    import json

    ran = sharder("check", "gpt", "--parallel.policy", "fsdp", "--topology", "v5e:16x16", "--report", tmp_path / "found.json", HOME=str(tmp_path), timeout=1800)
    assert ran.returncode == 0, ran.stderr
    traffic = json.loads((tmp_path / "found.json").read_text())["traffic"]
    gathered, reduced = gathered_and_reduced(256)
    assert traffic["gathered_bytes"] == pytest.approx(gathered, rel=0.02)
    assert reduced <= traffic["reduced_bytes"] <= 2 * reduced
