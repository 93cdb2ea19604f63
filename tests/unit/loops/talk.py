"""An environment for runs in threads, loaded by its path as a user's is."""

import os
import time


class Talk:
    """Ask again until the end; the reward of a turn is 1 for an answer of odd length."""

    def __init__(self, turns=2, wait_s=0.0, fails=False):
        self.turns = turns
        self.wait_s = wait_s
        self.fails = fails

    def reset(self, task):
        self.episode = task.episode

    def step(self, action):
        if self.episode == 1:
            time.sleep(self.wait_s)
        if self.fails:
            raise RuntimeError("the world has ended")
        observation = [{"role": "user", "content": "again"}]
        return observation, float(len(action.text) % 2), action.turn + 1 >= self.turns, {"pid": os.getpid()}
