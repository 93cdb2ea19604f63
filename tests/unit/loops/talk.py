"""An environment for runs in threads, loaded by its path as a user's is."""

import os
import time


class Talk:
    """Ask again until the end; the reward of a turn is 1 for an answer of odd length."""

    def __init__(self, turns=2, wait_s=0.0, fails=False, waits_in=""):
        self.turns = turns
        self.wait_s = wait_s
        self.fails = fails
        self.waits_in = waits_in  # the uid of a prompt; empty: in all

    def reset(self, task):
        self.waits = task.episode == 1 and task.uid.startswith(self.waits_in)

    def step(self, action):
        if self.waits:
            time.sleep(self.wait_s)
        if self.fails:
            raise RuntimeError("the world has ended")
        observation = [{"role": "user", "content": "again"}]
        return observation, float(len(action.text) % 2), action.turn + 1 >= self.turns, {"pid": os.getpid()}
