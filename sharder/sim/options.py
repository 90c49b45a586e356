"""What the user chooses about an evaluation in closed loop. Imports no jax: the command line shows its defaults at once."""

from dataclasses import dataclass, replace
from pathlib import Path

from sharder.config import require
from sharder.sim.metaworld import Scene


@dataclass(frozen=True)
class Trials:
    """Which episodes are played, and how the policy is asked."""

    episodes: int = 20
    """Of each task."""
    seed: int = 100_000
    """Of the first episode; the next have the next numbers. Recordings begin at 0: a policy must not have seen them."""
    replan_every: int | None = None
    """Actions of a chunk that are done before the policy looks again; unset: half of the chunk."""
    blank_images: bool = False
    """Show black pictures: a policy that looks must become worse."""
    image_size: int | None = None
    """Of the pictures, in pixels along each side; unset: as recorded (assets/scene.json), like the next two."""
    shadows: bool | None = None
    hold: int | None = None
    """Simulator steps for which an action is held."""
    max_steps: int = Scene.max_steps
    """Actions after which an episode counts as failed."""
    video: Path | None = None
    """GIF of the first episodes of each task; unset: RUN/figures/closed_loop.gif of a run, none of other weights."""
    video_episodes: int = 5
    """Of each task; 0: no GIF."""

    def __post_init__(self):
        require(self.episodes >= 1, "episodes", self.episodes, "at least 1")
        require(self.replan_every is None or self.replan_every >= 1, "replan_every", self.replan_every, "at least 1")
        for name in ("seed", "video_episodes"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        self.scene(Scene())

    def scene(self, recorded: Scene) -> Scene:
        """That of the demonstrations, with what was given in its place."""
        given = {"image_size": self.image_size, "shadows": self.shadows, "hold": self.hold, "max_steps": self.max_steps}
        return replace(recorded, **{name: value for name, value in given.items() if value is not None})
