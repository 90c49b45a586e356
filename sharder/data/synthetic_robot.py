"""Robot examples made from their id: coloured images that show a target, a prompt that names a task, actions that go there."""

import numpy as np

from sharder.config import Pi0Config
from sharder.data.dataset import Batch
from sharder.data.prompts import PromptEncoder
from sharder.data.synthetic import describe, hash_uint32
from sharder.data.tokenize import ByteTokenizer

TASKS = ("reach", "push", "lift", "open")


class SyntheticRobot:
    """Chunks of actions from the state to a target, smoothly; the target's place shows in every camera, the task changes the path.

    The last examples of an episode are filled up: a quarter of all chunks end early (`action_is_pad`), and every action
    dimension but the last is real (`action_dim_mask`), where there are several.
    """

    def __init__(self, num_examples: int, model: Pi0Config, salt: int = 0):
        self.num_examples, self.model, self.salt = num_examples, model, salt
        sizes = (
            model.variant,
            model.cameras,
            model.image_size,
            model.action_dim,
            model.action_horizon,
            model.max_prompt_len,
            model.vocab_size,
        )
        self.encode = PromptEncoder(ByteTokenizer(), model.variant == "pi05", model.max_prompt_len, model.vocab_size)
        self.fingerprint = describe("robot", num_examples, *sizes, salt)

    def __len__(self) -> int:
        return self.num_examples

    def read(self, ids: np.ndarray) -> Batch:
        model, A, T = self.model, self.model.action_dim, self.model.action_horizon
        bits = hash_uint32(ids, 2 * A + 4, self.salt)
        uniform = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
        state, target = uniform[:, :A], uniform[:, A : 2 * A]
        task = bits[:, 2 * A] % len(TASKS)
        num_real = max(A - 1, 1)
        dims = np.arange(A) < num_real
        progress = (np.arange(1, T + 1, dtype=np.float32) / np.float32(T))[:, None]
        bend = (task.astype(np.float32) * np.float32(0.2))[:, None, None] * progress * (1 - progress)
        path = state[:, None] + progress * (target - state)[:, None] + bend
        length = np.where(bits[:, 2 * A + 1] % 4 == 0, 1 + bits[:, 2 * A + 2] % T, T).astype(np.int64)
        step = np.minimum(np.arange(T)[None], length[:, None] - 1)
        actions = np.take_along_axis(path, step[:, :, None], axis=1) * dims
        batch = {
            "state": (state * dims).astype(np.float32),
            "actions": actions.astype(np.float32),
            "action_is_pad": np.arange(T)[None] >= length[:, None],
            "action_dim_mask": np.broadcast_to(dims, (len(ids), A)),
        }
        for number, camera in enumerate(model.cameras):
            batch[f"image/{camera}"] = self._image(target, number)
            # Every eighth example lacks one of the cameras but the first.
            batch[f"image_mask/{camera}"] = (bits[:, 2 * A + 3] % 8 != number) | (number == 0)
        tokens, token_mask = self.encode([TASKS[t] for t in task], batch["state"][:, :num_real])
        return batch | {"tokens": tokens, "token_mask": token_mask}

    def _image(self, target: np.ndarray, camera: int) -> np.ndarray:
        """(n, height, width, 3) uint8: brightness falls with the distance from the target, each channel shows two dimensions."""
        height, width = self.model.image_size
        rows, columns = np.linspace(-1, 1, height, dtype=np.float32), np.linspace(-1, 1, width, dtype=np.float32)
        channels = []
        for channel in range(3):
            x, y = (target[:, (2 * (channel + camera) + i) % target.shape[1]][:, None, None] for i in range(2))
            distance = np.square(rows[None, :, None] - y) + np.square(columns[None, None] - x)
            channels.append(np.clip(255 - 64 * distance, 0, 255))
        return np.stack(channels, axis=-1).astype(np.uint8)
