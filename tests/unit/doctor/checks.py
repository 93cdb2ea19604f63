"""Provide checks of the machine for tests, by their names."""

import os
import signal
import subprocess
import time
from pathlib import Path

from coati_rl.doctor.machine_check import Result
from coati_rl.errors import ConfigError


def hangs():
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(os.environ["COATI_TEST_PID_FILE"]).write_text(str(daemon.pid))
    time.sleep(1000)


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def raises():
    raise ValueError("not of our own")


def refuses():
    raise ConfigError("the field, its value, a remedy")


def passes():
    print("noise of a library")  # noqa: T201
    return Result(status="ok", evidence="passed")


def warns():
    return Result(status="warn", evidence="a little \x1b[2J of something", remedy="more of it")
