"""A robot policy: from what a robot sees to what it should do, by the same transforms as in training.

Shape letters: B batch, T steps of a chunk, A action dimension of the model, S numbers of a state.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sharder.config import Pi0Config, UserError
from sharder.data.assets import Usage
from sharder.data.chunks import absolute_actions, pad_last
from sharder.data.normalize import unnormalize
from sharder.data.prompts import PromptEncoder
from sharder.data.robot_dataset import Scaling
from sharder.data.robots import Robot, lookup, read_observation

LONGEST_PROMPT = 10_000
"""Characters; training cuts prompts to a few hundred tokens."""
Sample = Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray]
"""(batch, noise (B, T, A)) to actions (B, T, A), both float32, as `sharder.models.pi0.Pi0.sample`."""


@dataclass(frozen=True)
class Example:
    """An observation as the model takes it, without the dimension of the batch."""

    batch: dict[str, np.ndarray]
    state_S: np.ndarray
    """In the policy's units, before normalisation."""
    noise_TA: np.ndarray


@dataclass(frozen=True)
class Policy:
    """Weights, and how they are asked."""

    model: Pi0Config
    usage: Usage
    robot: Robot
    scaling: Scaling
    encode_prompts: PromptEncoder
    sample: Sample
    seed: int = 0

    @property
    def num_actions(self) -> int:
        """Numbers of an action."""
        stats = self.scaling.stats.get("actions")
        known = self.usage.num_actions or self.robot.num_actions or (None if stats is None else len(stats.mean))
        return min(known or self.model.action_dim, self.model.action_dim)

    @property
    def state_dim(self) -> int | None:
        """Numbers of a state; None where nothing tells: statistics of as many dimensions as the model has may be filled up."""
        stats = self.scaling.stats.get("state")
        of_stats = None if stats is None or len(stats.mean) >= self.model.action_dim else len(stats.mean)
        return self.usage.state_dim or of_stats

    def describe(self) -> dict:
        """What a client has to know, as plain values."""
        keys = self.robot.request
        return {
            "model": self.model.variant, "robot": self.robot.name, "cameras": [keys.cameras[c] for c in self.model.cameras if c in keys.cameras],
            "state": list(keys.state), "state_dim": self.state_dim, "prompt": self.usage.prompt, "num_actions": self.num_actions,
            "action_horizon": self.model.action_horizon, "normalization": self.scaling.how, "relative": list(self.usage.relative),
        }  # fmt: skip

    def blank(self) -> dict:
        """An observation of zeros that this policy takes."""
        keys, model = self.robot.request, self.model
        size = self.state_dim or max(1, len(self.robot.relative), self.robot.num_actions or 0)
        states = {key: np.zeros(0 if number else size, np.float32) for number, key in enumerate(keys.state)}
        return {key: np.zeros((*model.image_size, 3), np.uint8) for key in keys.cameras.values()} | states | {"prompt": ""}

    def read(self, observation: dict) -> Example:
        """Raises UserError naming the field that is missing or wrong."""
        found = read_observation(self.robot, observation, self.model.cameras, self.model.image_size)
        state = found.pop("state")
        self._check_state(state)
        normalised = self.scaling("state", state[None])
        tokens, mask = self.encode_prompts([self._prompt(observation)], normalised)
        batch = found | {"tokens": tokens[0], "token_mask": mask[0], "state": pad_last(normalised, self.model.action_dim)[0]}
        return Example(batch, state, self._noise(batch))

    def _check_state(self, state: np.ndarray) -> None:
        keys, wanted, largest = " + ".join(self.robot.request.state), self.state_dim, self.model.action_dim
        if wanted is not None and len(state) != wanted:
            raise UserError(f"{keys} has {len(state)} numbers, but this policy takes {wanted}.")
        if not len(self.robot.relative) <= len(state) <= largest:
            raise UserError(
                f"{keys} has {len(state)} numbers, but this policy takes {max(1, len(self.robot.relative))} to {largest}."
            )

    def _prompt(self, observation: dict) -> str:
        if "prompt" not in observation and self.usage.prompt is not None:
            return self.usage.prompt
        value = lookup(observation, "prompt")
        text = value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
        if not isinstance(text, str):
            raise UserError(f"prompt is of type {type(value).__name__}, but must be text.")
        if len(text) > LONGEST_PROMPT:
            raise UserError(f"prompt has {len(text)} characters, but at most {LONGEST_PROMPT} are read.")
        return text

    def _noise(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """Of this observation, whatever else is in its batch; (T, A) float32."""
        digest = hashlib.sha256()
        for name in sorted(batch):
            digest.update(batch[name].tobytes())
        rng = np.random.default_rng([self.seed, *np.frombuffer(digest.digest(), "<u4").tolist()])
        return rng.standard_normal((self.model.action_horizon, self.model.action_dim), np.float32)

    def act(self, examples: Sequence[Example], batch_size: int) -> list[np.ndarray]:
        """Actions (T, num_actions) float32 for each example, in the robot's units; the batch is filled up with copies."""
        rows = [*examples, *[examples[0]] * (batch_size - len(examples))]
        batch = {name: np.stack([row.batch[name] for row in rows]) for name in examples[0].batch}
        actions_BTA = self.sample(batch, np.stack([row.noise_TA for row in rows]))
        return [self.decode(actions, example.state_S) for actions, example in zip(actions_BTA, examples)]

    def decode(self, actions_TA: np.ndarray, state_S: np.ndarray) -> np.ndarray:
        """What the model gives for a state, in the robot's units."""
        actions = np.asarray(actions_TA, np.float32)[:, : self.num_actions]
        if self.scaling.how != "none":
            actions = unnormalize(actions, self.scaling.stats["actions"], self.scaling.how, self.scaling.least_range)
        if any(self.robot.relative):
            actions = absolute_actions(actions, state_S, self.robot.relative)
        return self.robot.decode_actions(actions).astype(np.float32)
