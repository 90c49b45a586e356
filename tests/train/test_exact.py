"""Exact mode inside this process: meshes over the eight simulated devices, and what it asserts about itself."""

import dataclasses
import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import needs_tested_jax, small_dropout

from sharder.accounting import account_workers
from sharder.config import MlpConfig, UserError
from sharder.data.loader import read_step
from sharder.data.open import open_datasets
from sharder.data.order import Order
from sharder.data.synthetic import SyntheticTokens
from sharder.train.exact import ExactStep
from sharder.train.fingerprint import combine, numpy_digest
from sharder.train.setup import prepare
from sharder.train.state import by_path, create_state
from sharder.train.step import compile_step
from sharder.train.stepping import Stepper
from sharder.train.workers import WorkerSlots


def change(config, **sections):
    return dataclasses.replace(config, **{s: dataclasses.replace(getattr(config, s), **f) for s, f in sections.items()})


def exact(**parallel):
    return change(small_dropout(), parallel={"reduction": "exact", **parallel})


DEVICES = jax.devices()


def pretend(patch, n):
    """As if there were only the first n devices."""
    patch.setattr(jax, "devices", lambda *_: DEVICES[:n])
    patch.setattr(jax, "device_count", lambda *_: n)
    patch.setattr(jax, "local_device_count", lambda *_: n)


@pytest.fixture
def on_devices(monkeypatch):

    def limit(n):
        pretend(monkeypatch, n)

    return limit


def trace(config, steps=4, step_type=None):
    """(loss bits, norm bits, fingerprint) of every step, and the compiled step."""
    setup = prepare(config)
    training, _ = open_datasets(config)
    order = Order(len(training), config.train.global_batch_size, config.train.seed)
    layout = setup.workers or setup.batch
    state = create_state(config, setup.declared, setup.state_shardings)
    stepper = Stepper(setup, None, [], None)
    arguments = stepper.arguments(state, layout.abstract(training.read(np.arange(1))), False)
    step = (step_type or ExactStep)(setup, setup.workers, arguments) if setup.workers else compile_step(setup, arguments)
    paths, found = list(by_path(state)), []
    for number in range(steps):
        batch = layout.to_devices(read_step(training, order, layout, number))
        state, metrics = step(*stepper.arguments(state, batch, False))
        metrics = jax.device_get(metrics)
        found.append((metrics["loss"].tobytes(), metrics["grad_norm"].tobytes(), combine(metrics["digests"], paths)))
    return found, step, state


@pytest.fixture(scope="module")
def reference():
    """One replica: dropout, clipping and a moving average are on."""
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, 1)
        return trace(exact())[0]


def agree(on_devices, config, meshes, steps=4):
    """The run over all these meshes (data, fsdp), asserted to be the same in bits at every step."""
    found = []
    for data, fsdp in meshes:
        on_devices(data * fsdp * config.parallel.tensor)
        found.append(trace(change(config, parallel={"data": data, "fsdp": fsdp}), steps)[0])
    assert all(f == found[0] for f in found), [[a == b for a, b in zip(f, found[0])] for f in found]
    return found[0]


PLACEMENTS = [("zero", 2, 1), ("dp", 1, 4), ("fsdp", 2, 4)]
"""Few, and of every kind: a program takes seconds to compile for each. `make test-exact` has all."""


@pytest.mark.parametrize("policy, data, fsdp", PLACEMENTS)
def test_the_bits_do_not_depend_on_mesh_or_policy(on_devices, reference, policy, data, fsdp):
    on_devices(data * fsdp)
    assert trace(exact(policy=policy, data=data, fsdp=fsdp))[0] == reference


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
@pytest.mark.parametrize("data, fsdp", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (2, 4), (4, 2), (8, 1), (1, 8)])
@pytest.mark.parametrize("variant", ["plain", "bfloat16", "remat", "microbatches"])
def test_the_full_matrix(on_devices, policy, data, fsdp, variant):
    config = change(
        exact(),
        model={
            "compute_dtype": "bfloat16" if variant == "bfloat16" else "float32",
            "remat": "block" if variant == "remat" else "none",
        },
        train={"global_batch_size": 32, "microbatch_size": 2 if variant == "microbatches" else None},
    )
    if variant not in WHOLE:
        on_devices(1)
        WHOLE[variant] = trace_to_the_end(config)
    on_devices(data * fsdp)
    assert trace_to_the_end(change(config, parallel={"policy": policy, "data": data, "fsdp": fsdp})) == WHOLE[variant]


WHOLE: dict = {}


def trace_to_the_end(config):
    """Every one of twenty steps, and the SHA-256 of all parameters after them."""
    found, _, state = trace(config, steps=20)
    params = {path: np.asarray(x) for path, x in by_path(state).items() if path.startswith("params/")}
    assert params
    return found, hashlib.sha256(b"".join(path.encode() + params[path].tobytes() for path in sorted(params))).hexdigest()


def some_and_all(some, all_of_them):
    """The meshes of `make test`, and those of `make test-exact`."""
    return pytest.mark.parametrize("meshes", [some, pytest.param(all_of_them, marks=pytest.mark.slow)], ids=["some", "all"])


@some_and_all([(1, 1), (2, 2)], [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4)])
def test_tensor_parallel_replicas_agree_among_themselves(on_devices, meshes):
    agree(on_devices, exact(policy="fsdp", tensor=2), meshes)


@needs_tested_jax  # with 0.12 the update of some of its shards has other bits
@some_and_all([(1, 1), (2, 4)], [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (2, 4), (4, 2), (8, 1), (1, 8)])
def test_the_mlp_agrees_too(on_devices, meshes):
    config = change(exact(policy="fsdp"), data={"num_examples": 256}, train={"global_batch_size": 64})
    config = dataclasses.replace(config, model=MlpConfig(input_dim=16, hidden_dim=32, num_layers=2, output_dim=8))
    agree(on_devices, config, meshes)


MOMENTS = [
    ("zero", 1, 1),
    ("fsdp", 1, 4),
    ("dp", 2, 1),
    ("fsdp", 2, 4),
    ("zero", 1, 8),
    ("dp", 8, 1),
    ("fsdp", 2, 2),
    ("fsdp", 1, 2),
]


@pytest.mark.slow  # tests/train/test_moments.py has a shorter one, of the update alone
@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
@needs_tested_jax
def test_moments_in_fewer_bits_agree_too(on_devices, reference, moments):
    found = []
    for policy, data, fsdp in MOMENTS:
        on_devices(data * fsdp)
        config = change(exact(policy=policy, data=data, fsdp=fsdp), optimizer={"moments": moments})
        found.append(trace(config, steps=6)[0])
    assert all(f == found[0] for f in found), [[a == b for a, b in zip(f, found[0])] for f in found]
    assert found[0][:4] != reference, "these are other moments"


@some_and_all([(1, 1), (2, 2)], [(1, 1), (2, 1), (2, 2), (1, 8), (4, 2)])
def test_weighted_targets_agree_too(on_devices, monkeypatch, reference, meshes):
    """Documents packed one after the other: the target that belongs to the next document has weight 0."""

    def read(self, ids):
        batch = ORIGINAL_READ(self, ids)
        return batch | {"weights": (batch["targets"] % 3 != 0).astype(np.float32)}

    monkeypatch.setattr(SyntheticTokens, "read", read)
    assert agree(on_devices, exact(), meshes) != reference


ORIGINAL_READ = SyntheticTokens.read

LEAN_MESHES = [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (2, 4), (4, 2), (8, 1), (1, 8)]


@needs_tested_jax
def test_lean_agrees_with_itself_from_two_replicas_on(on_devices):
    agree(on_devices, exact(policy="fsdp", exact_memory="lean"), [(1, 2), (2, 4)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"compute_dtype": "bfloat16"},
        {"param_dtype": "bfloat16"},
        {"remat": "block"},
        {"compute_dtype": "bfloat16", "remat": "block"},
    ],
    ids=str,
)
@needs_tested_jax
def test_the_full_matrix_of_lean(on_devices, model):
    agree(on_devices, change(exact(policy="fsdp", exact_memory="lean"), model=model), LEAN_MESHES, steps=20)


@some_and_all([(1, 2), (2, 2)], [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4)])
@needs_tested_jax
def test_lean_agrees_with_itself_with_tensor_parallelism(on_devices, meshes):
    agree(on_devices, exact(policy="fsdp", exact_memory="lean", tensor=2), meshes)


@pytest.mark.slow
@needs_tested_jax
def test_lean_agrees_with_the_copy_within_rounding(on_devices):
    on_devices(4)
    copy, lean = (trace(exact(policy="fsdp", exact_memory=m), steps=20)[0] for m in ("copy", "lean"))
    losses = [np.array([np.frombuffer(x[0], np.float32)[0] for x in found]) for found in (copy, lean)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def whole_bytes(step):
    """Of all parameters, which are float32 here, as are their gradients."""
    return 4 * sum(int(np.prod(leaf.decl.shape)) for leaf in step.setup.plan.leaves.values())


def test_memory_of_a_copy_is_that_of_the_formula(on_devices):
    """A whole copy, a whole gradient, and an accumulator in the update layout, as the docstrings say."""
    on_devices(4)
    step = trace(exact(policy="fsdp"), steps=1)[1]
    output = {name: program.memory_analysis().output_size_in_bytes for name, program in step.programs.items()}
    scalars = 1000  # tuples of pointers, losses and digests
    for name, size in {"gather": 1, "worker": 1, "reduce": 1 / 4, "add": 1 / 4}.items():
        assert 0 <= output[name] - size * whole_bytes(step) < scalars, name


@needs_tested_jax
def test_lean_holds_one_block_at_a_time(on_devices):
    """Of many layers; weights and gradients of a whole copy would be twice its size."""
    on_devices(8)
    config = change(exact(policy="fsdp", exact_memory="lean"), model={"num_layers": 32}, train={"global_batch_size": 8})
    step = trace(config, steps=1)[1]
    analysis = step.programs["slot"].memory_analysis()
    assert analysis.temp_size_in_bytes + analysis.output_size_in_bytes < whole_bytes(step)


def test_fast_mode_agrees_within_rounding(on_devices):
    on_devices(8)
    slow, _, state_a = trace(exact(), steps=20)
    fast, _, state_b = trace(change(exact(), parallel={"reduction": "fast"}), steps=20)
    loss = lambda found: np.array([np.frombuffer(x[0], np.float32)[0] for x in found])  # noqa: E731
    np.testing.assert_allclose(loss(fast), loss(slow), rtol=1e-5)
    assert [x[2] for x in fast] != [x[2] for x in slow], "the comparison would see a difference"


@pytest.mark.parametrize("size", range(2, 18))
def test_the_update_is_shape_proof_for_small_shards(size):
    """AdamW on slices of 2 to 17 elements gives the bits of the whole; single elements are kept from it by the plan."""
    import optax

    rng = np.random.default_rng(size)
    whole = 8 * size
    params, grads = (rng.standard_normal(whole).astype(np.float32) for _ in range(2))
    optimizer = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-3))

    def steps(p, g):
        state = optimizer.init(p)
        for _ in range(3):
            updates, state = optimizer.update(g, state, p)
            p = optax.apply_updates(p, updates)
        return p, state

    expected = jax.tree.leaves(jax.jit(steps)(params, grads))
    pieces = [jax.tree.leaves(jax.jit(steps)(params[i : i + size], grads[i : i + size])) for i in range(0, whole, size)]
    for k, e in enumerate(expected):
        if np.ndim(e):
            assert np.array_equal(np.concatenate([p[k] for p in pieces]), e)


def test_a_worker_runs_v_over_n_times_per_replica_and_step(on_devices):
    for n in (2, 8):
        on_devices(n)
        _, step, _ = trace(exact(), steps=3)
        assert step.num_worker_runs == 3 * n * (8 // n)


@pytest.mark.parametrize(
    "reduction, microbatch_size",
    [
        ("exact", 2),
        ("fast", 2),
        pytest.param("exact", None, marks=pytest.mark.slow),
        pytest.param("fast", None, marks=pytest.mark.slow),
    ],
)
def test_the_digest_of_the_batch_is_that_of_the_examples_in_their_order(on_devices, reduction, microbatch_size):
    on_devices(4)
    config = change(
        exact(), parallel={"reduction": reduction}, train={"global_batch_size": 32, "microbatch_size": microbatch_size}
    )
    training, _ = open_datasets(config)
    examples = training.read(Order(len(training), 32, config.train.seed).ids(0, 0, 32))
    expected = sum(numpy_digest(name, x) for name, x in examples.items())
    assert np.array_equal(batch_digest(config), expected)


def batch_digest(config):
    setup = prepare(config)
    training, _ = open_datasets(config)
    layout = setup.train_batch
    state = create_state(config, setup.declared, setup.state_shardings)
    stepper = Stepper(setup, None, [], None)
    batch = layout.to_devices(read_step(training, Order(len(training), 32, config.train.seed), layout, 0))
    arguments = stepper.arguments(state, batch, False)
    step = ExactStep(setup, setup.workers, arguments) if setup.workers else compile_step(setup, arguments)
    return jax.device_get(step(*arguments)[1]["batch_digest"])


def test_state_at_rest_is_divided(on_devices):
    on_devices(8)
    _, _, state = trace(exact(policy="fsdp"), steps=1)
    for path, x in by_path(state).items():
        if x.ndim:
            assert x.addressable_shards[0].data.size == x.size // 8, path


# The comparison must catch what it is there for: each mutation breaks one thing, and is switched on here only.


def replicas_after_slots(monkeypatch):
    from sharder.ops import ordered

    def push_in_a_row(self, term):
        self._blocks = [(1, term if not self._blocks else self.add(self._blocks[0][1], term))]

    monkeypatch.setattr(ordered.TreeAccumulator, "push", push_in_a_row)


def library_norm(monkeypatch):
    import sharder.train.exact as module

    def library(leaves, chunkings):
        sums = [
            jnp.sum(jnp.square(x)) if c.fsdp == 1 else jax.lax.psum(jnp.sum(jnp.square(x)), "fsdp")
            for x, c in zip(leaves, chunkings)
        ]
        return jnp.stack(sums)

    monkeypatch.setattr(module, "ordered_sums_of_squares", library)


def psum_reduction(monkeypatch):
    import sharder.train.workers as module

    def psum(x, dim, data, fsdp, divided):
        whole = jax.lax.psum(x, ("data", "fsdp"))
        if not divided:
            return whole
        size = x.shape[dim] // fsdp
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index("fsdp") * size, size, dim)

    monkeypatch.setattr(module, "ordered_sum", psum)


def noise_by_device(monkeypatch):
    monkeypatch.setattr(WorkerSlots, "_first_example", lambda self, slot, replica: np.int32(replica))


@pytest.mark.parametrize("mutate", [replicas_after_slots, library_norm, psum_reduction, noise_by_device])
def test_the_comparison_catches(monkeypatch, on_devices, mutate):
    mutate(monkeypatch)
    found = []
    for n in (1, 8):
        on_devices(n)
        found.append(trace(exact(policy="fsdp"))[0])
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "batch, workers, micro, replicas, message",
    [
        (16, 8, None, 3, r"power of two of replicas, but there are 3: use one of \[1, 2\]"),
        (32, 4, None, 8, "cannot grow beyond 4 replicas"),
        (20, 8, None, 4, "use 16 or 24"),
        (64, 8, 3, 4, r"the 8 examples of a virtual worker: use one of \[1, 2, 4, 8\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(batch, workers, micro, replicas, message):
    config = change(exact(virtual_workers=workers), train={"global_batch_size": batch, "microbatch_size": micro})
    with pytest.raises(UserError, match=message):
        account_workers(config, replicas)


def test_v_must_be_a_power_of_two():
    with pytest.raises(UserError, match="--parallel.virtual-workers is 6, but must be a power of two"):
        exact(virtual_workers=6)


def test_accounting_multiplies_to_the_global_batch():
    for workers, micro, replicas in itertools.product((4, 8), (None, 1, 2), (1, 2, 4)):
        config = change(exact(virtual_workers=workers), train={"global_batch_size": 32, "microbatch_size": micro})
        assert account_workers(config, replicas).global_batch_size == 32
