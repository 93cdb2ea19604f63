"""List programs that start many or lasting processes: none is left when the program has ended."""

from tests.integration.sandbox.attack import CALLS, Attack

ATTACKS = (
    Attack(
        name="fork bomb",
        source="import os\nwhile True: os.fork()",
        prints="",
        ends=("exit 1", "cpu", "wall"),
    ),
    Attack(
        name="fork bomb that goes on when it cannot",
        source="""
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        prints="",
        ends=("cpu",),
    ),
    Attack(
        name="fork bomb of daemons",
        source="""
import os, time
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() > 0:
                os._exit(0)
    except OSError:
        time.sleep(0.01)
""",
        prints="",
        ends=("cpu", "wall"),
    ),
    Attack(
        name="fork bomb behind an ended program",
        source="""
import os
if os.fork() == 0:
    while True:
        try:
            os.fork()
        except OSError:
            pass
print("held")
""",
    ),
    Attack(
        name="shell bomb",
        source="""
import subprocess
subprocess.run(["bash", "-c", "bomb() { bomb | bomb & }; bomb"], stderr=subprocess.DEVNULL)
print("held")
""",
    ),
    Attack(
        name="thread bomb",
        source="""
import threading, time
started = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        started += 1
except RuntimeError:
    print("held" if started < 40 else started)
""",
    ),
    Attack(
        name="all the processes there are, by exec",
        source="""
import subprocess
started = 0
try:
    while True:
        subprocess.Popen(["sleep", "100"])
        started += 1
except OSError:
    print("held" if started < 40 else started)
""",
    ),
    Attack(
        name="children that nobody collects",
        source="""
import os
started = 0
try:
    while True:
        if os.fork() == 0:
            os._exit(0)
        started += 1
except OSError:
    print("held" if started < 40 else started)
""",
    ),
    Attack(
        name="daemon that writes later",
        source="""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.3)
        os.write(1, b"later")
        os.write(2, b"later")
        open("/tmp/later", "w").write("later")
        time.sleep(100)
    os._exit(0)
print("held")
""",
    ),
    Attack(
        name="daemon that holds the output",
        source="""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True: time.sleep(100)
print("held")
""",
    ),
    Attack(
        name="daemons that no signal of the parent's end reaches",
        source=CALLS
        + """
for _ in range(10):
    if os.fork() == 0:
        call("prctl", 1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: none
        call("prctl", 36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        os.setsid()
        if os.fork() == 0:
            os.execlp("sleep", "sleep", "100")
        time.sleep(100)
time.sleep(0.1)
print("held")
""",
    ),
    Attack(
        name="a child of the sandbox's own process",
        source=CALLS + "print(call('clone', 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) == -errno.EINVAL)  # CLONE_PARENT",
        prints="True\n",
    ),
    Attack(
        name="process 1 killed by a child",
        source="""
import os, signal
if os.fork() == 0:
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        os.kill(1, number)
    os._exit(0)
os.wait()
print("held")
""",
    ),
    Attack(
        name="everything killed that can be",
        source="""
import os, signal
for pid in (-1, 0, 2, 3, os.getppid(), -os.getpgrp()):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print("held")
""",
    ),
    Attack(
        name="guessed processes of the machine killed",
        source="""
import os, signal
found = [pid for pid in [*range(2, 70000), @HOST_PID@, @SLEEPER_PID@] if pid != os.getpid()]
killed = 0
for pid in found:
    try:
        os.kill(pid, signal.SIGKILL)
        killed += 1
    except ProcessLookupError:
        pass
print("held" if killed == 0 else killed)
""",
    ),
)
