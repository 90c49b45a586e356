"""What the user chooses about a server. Imports no jax, so that the command line may show its defaults at once."""

from dataclasses import dataclass

from sharder.config import Dtype
from sharder.data_config import Normalization, RobotPolicy
from sharder.fields import check_fields, require


@dataclass(frozen=True)
class ServerOptions:
    """Where it listens, and what it lets in."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0: every interface of this machine."""
    port: int = 8000
    """0: any free port."""
    api_key_file: str | None = None
    """File whose first line clients must send as `Authorization: Api-Key KEY`; unset: anyone may ask."""
    batch_sizes: tuple[int, ...] = (1, 4)
    """Numbers of requests that are answered together; each is compiled before the server listens."""
    max_waiting: int = 64
    """Requests that may wait; more are refused."""
    max_request_mb: int = 64
    """Largest request."""
    metadata: str | None = None
    """JSON file whose fields are sent to every client that connects, as openpi's policy_metadata."""

    def __post_init__(self):
        check_fields(self, "server")
        require(0 <= self.port < 65536, "port", self.port, "from 0 to 65535")
        sizes = self.batch_sizes
        require(
            1 <= len(sizes) <= 8 and all(1 <= n <= 1024 for n in sizes),
            "batch-sizes",
            sizes,
            "one to eight numbers from 1 to 1024",
        )
        require(1 <= self.max_waiting <= 65536, "max-waiting", self.max_waiting, "from 1 to 65536")
        require(1 <= self.max_request_mb <= 1024, "max-request-mb", self.max_request_mb, "from 1 to 1024")


@dataclass(frozen=True)
class SamplingOptions:
    """How actions are drawn."""

    num_steps: int = 10
    """Steps from noise to actions."""
    seed: int = 0
    """The noise is a function of this and of the observation: the same request gives the same actions."""
    average: bool = False
    """Use the moving average of the parameters, which runs with --train.ema-decay keep."""

    def __post_init__(self):
        check_fields(self, "sampling")
        require(1 <= self.num_steps <= 10_000, "num-steps", self.num_steps, "from 1 to 10000")
        require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2**32)")


@dataclass(frozen=True)
class ModelOptions:
    """What no shape of the weights tells; unset: as the run was trained, or as openpi's defaults are."""

    cameras: tuple[str, ...] | None = None
    """In the order in which the model sees them."""
    action_horizon: int | None = None
    """Steps of a chunk of actions."""
    max_prompt_len: int | None = None
    """Tokens of a prompt, filled up."""
    state_in_prompt: bool | None = None
    """pi0.5: whether the state is part of the prompt; openpi's pi05_libero was trained without."""
    compute_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    """bfloat16: half the memory."""


@dataclass(frozen=True)
class RobotOptions:
    """How the policy is asked; unset: as assets/robot.json says, else as the robot's policy does."""

    policy: RobotPolicy | None = None
    """Names, units and relative actions of a robot."""
    cameras: tuple[str, ...] | None = None
    """MODEL=REQUEST for each camera, as base_0_rgb=observation/image."""
    state: tuple[str, ...] | None = None
    """Keys in a request whose numbers, one after the other, are the state."""
    relative: tuple[int, ...] | None = None
    """Lengths of stretches of actions that are relative to the state, negative where they are not: 6 -1."""
    adapt_to_pi: bool | None = None
    """ALOHA: joints and grippers as the released pi0 knows them."""
    normalization: Normalization | None = None
    """auto: z_score for pi0, quantile for pi0.5."""
    num_actions: int | None = None
    """Numbers of an action; unset: as many as the robot or the statistics have."""
    prompt: str | None = None
    """Where a request has none."""

    def __post_init__(self):
        check_fields(self, "robot")
        for entry in self.cameras or ():
            place, _, key = entry.partition("=")
            require(bool(place and key), "robot.cameras", self.cameras, "MODEL=REQUEST for each camera")
        require(self.num_actions is None or self.num_actions >= 1, "robot.num_actions", self.num_actions, "at least 1")
        require(0 not in (self.relative or ()), "robot.relative", self.relative, "lengths other than 0")
