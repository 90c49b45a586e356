"""A simulator without a simulator: a joint on a lane, seen by cameras that hang upside down, as Meta-World's do."""

from types import SimpleNamespace

import numpy as np

from sharder.sim.metaworld import Scene, World

GOAL = 1.0


class Lane:
    """Succeeds where its one joint has come to 1; the target's colour is seen, and stands in no number but the last."""

    def __init__(self, image_size: int = 16):
        self.image_size = image_size
        self.mujoco_renderer, self.model = SimpleNamespace(camera_id=0), SimpleNamespace(camera=self._camera)

    @staticmethod
    def _camera(name: str):
        return SimpleNamespace(id=name)

    def seed(self, seed: int) -> None:
        self.start = np.float64(seed / 10)

    def reset(self):
        self.x = self.start
        return np.full(39, self.x), {}

    def render(self) -> np.ndarray:
        upside_down = np.zeros((self.image_size, self.image_size, 3), np.uint8)
        upside_down[0] = 200  # the floor
        upside_down[0, 0, 2] = 100  # a mark at its right end
        return upside_down

    def step(self, action):
        self.x += action[0] / 8
        return np.full(39, self.x), 0.0, False, False, {"success": self.x >= GOAL}

    def close(self) -> None:
        pass


class Expert:
    def get_action(self, observation):
        return np.array([5.0, 0, 0, 0])


def lane(scene: Scene) -> World:
    return World(Lane(scene.image_size), scene)
