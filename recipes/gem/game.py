"""An environment of GEM as pip installs it, for the program `user`: reset, step, reward."""

from __future__ import annotations

import gem

from meshrl.rollout.programs.user import EndedError, Session


async def play(session: Session) -> dict[str, float]:
    """One episode of the environment that the row names; its reward is the sum of those of the steps."""
    given = session.task.extra_info
    env = gem.make(given["env"])
    env.reset(seed=given["seed"])  # what it shows is the prompt
    score = turns = 0.0
    try:
        said = await session.reply()
        while True:
            seen, reward, terminated, truncated, _ = env.step(said)
            score, turns = score + float(reward), turns + 1
            if terminated or truncated:
                break
            said = await session.say(seen)  # observed, not trained on
    except EndedError:
        pass  # no turn or no token is left
    return {"score": score, "turns": turns}
