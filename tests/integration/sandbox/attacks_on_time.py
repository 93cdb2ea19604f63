"""List programs that do not end, or use more CPU time than their limit: each is ended by it."""

from tests.integration.sandbox.attack import CALLS, Attack

ATTACKS = (
    Attack(name="endless loop", source="while True: pass", prints="", ends=("cpu",)),
    Attack(
        name="endless loop that ignores all signals",
        source="""
import signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True: pass
""",
        prints="",
        ends=("cpu",),
    ),
    Attack(
        name="endless loop in every except clause",
        source="""
def loop():
    while True:
        try:
            while True: pass
        except BaseException:
            pass
        finally:
            loop()
loop()
""",
        prints="",
        ends=("cpu",),
    ),
    Attack(
        name="children burn while the parent sleeps",
        source="""
import os, time
for _ in range(4):
    if os.fork() == 0:
        while True: pass
time.sleep(100)
""",
        prints="",
        ends=("cpu",),
    ),
    Attack(
        name="short children burn that nobody collects, so that their time is in no record",
        source="""
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0:
            end = time.monotonic() + 0.015
            while time.monotonic() < end: pass
            os._exit(0)
    except OSError:
        time.sleep(0.005)
""",
        prints="",
        ends=("cpu",),
    ),
    Attack(
        name="a shell burns in the program's place",
        source="import os; os.execl('/bin/sh', 'sh', '-c', 'while :; do :; done')",
        prints="",
        ends=("cpu",),
    ),
    Attack(
        name="timers that fire all the time",
        source="""
import signal
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)
while True: signal.pause()
""",
        prints="",
        ends=("cpu", "wall"),
    ),
    Attack(name="9 ** 9 ** 9", source="print(9 ** 9 ** 9)", prints="", ends=("cpu",)),
    Attack(
        name="regular expression that goes back for ever",
        source="import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
        prints="",
        ends=("cpu",),
    ),
    Attack(
        name="endless exit handler",
        source="import atexit, time; atexit.register(time.sleep, 100); print('end')",
        prints=None,
        ends=("wall",),
    ),
    Attack(name="sleep", source="import time; time.sleep(100)", prints="", ends=("wall",)),
    Attack(
        name="deadlock",
        source="import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
        prints="",
        ends=("wall",),
    ),
    Attack(
        name="a pipe in which nobody writes",
        source="import os; r, w = os.pipe(); os.read(r, 1)",
        prints="",
        ends=("wall",),
    ),
    Attack(
        name="a stopped child that is waited for",
        source="""
import os, signal
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(child, 0)
""",
        prints="",
        ends=("wall",),
    ),
    Attack(
        name="stopping itself",
        source="import os, signal; os.kill(os.getpid(), signal.SIGSTOP); print('held')",
    ),
    Attack(
        name="a thread that sleeps past the end",
        source="import threading, time; threading.Thread(target=time.sleep, args=(100,)).start(); print('end')",
        prints=None,
        ends=("wall",),
    ),
    Attack(
        name="sleep in which every waking is ignored",
        source="""
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
    signal.signal(number, signal.SIG_IGN)
os.setpgid(0, 0) if os.getpgrp() != os.getpid() else None
while True: time.sleep(1)
""",
        prints="",
        ends=("wall",),
    ),
    Attack(
        name="a lower priority, to be kept from the cores by others",
        source=CALLS
        + """
print(attempt(os.nice, 19), attempt(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0)),
    attempt(os.sched_setscheduler, 0, os.SCHED_BATCH, os.sched_param(0)), refused("setpriority", 0, 0, 19))
""",
        prints="EPERM EPERM EPERM True\n",
    ),
    Attack(
        name="a higher priority, and real time",
        source=CALLS
        + """
print(attempt(os.nice, -5), attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50)),
    attempt(os.sched_setscheduler, 0, os.SCHED_RR, os.sched_param(1)))
""",
        prints="EPERM EPERM EPERM\n",
    ),
    Attack(
        name="all on one core, to wait there",
        source=CALLS + "print(attempt(os.sched_setaffinity, 0, {0}))",
        prints="EPERM\n",
    ),
    Attack(
        name="flushing the machine's disks again and again",
        source="import os\nfor _ in range(10**4): os.sync()\nprint('held')",
    ),
)
