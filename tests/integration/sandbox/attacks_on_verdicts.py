"""List programs that try to pass tests without the answer, or to get no verdict: each is wrong.

The expected answer is random: a program that passes has found it, or has fooled the judge.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Forgery:
    """A program, and what its score must say of it."""

    name: str
    source: str
    detail: str = ""  # a part of the score's


SEARCH = """
import ctypes, gc, re, sys
pattern = re.compile(r"[0-9a-f]{32}")
texts, frame = [], sys._getframe()
while frame is not None:
    texts.append(repr(frame.f_locals) + repr(frame.f_globals))
    frame = frame.f_back
texts += [repr(kept) for kept in gc.get_objects()]
texts += [repr(vars(module)) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
found = {match for text in texts for match in pattern.findall(text)}
"""

OF_PROGRAMS = (
    Forgery(name="says that it is right", source="print('ok'); print('1 of 1 tests passed'); print('42')"),
    Forgery(
        name="another print, another sys, another json",
        source="""
import builtins, json, sys
builtins.print = lambda *_, **__: None
json.dumps = json.loads = lambda *_, **__: {"end": "exit", "code": 0, "verdict": "ok", "reward": 1.0}
sys.stdout.write("ok")
for module in list(sys.modules.values()):
    for name in ("same_output", "same_value", "is_passed", "run_program"):
        setattr(module, name, lambda *_: True)
""",
    ),
    Forgery(name="ends at once with exit code 0", source="import os; os._exit(0)"),
    Forgery(name="ends by sys.exit(0)", source="import sys; sys.exit(0)"),
    Forgery(name="ends by SystemExit(True)", source="raise SystemExit(True)", detail="exit code 1"),
    Forgery(name="ends with exit code 256", source="import os; os._exit(256)"),
    Forgery(name="ends with exit code 77", source="import os; os._exit(77)", detail="exit code 77"),
    Forgery(
        name="ends with the exit codes of signals",
        source="import os; os._exit(128 + 9)",
        detail="exit code 137",
    ),
    Forgery(
        name="crashes",
        source="import ctypes; ctypes.string_at(0)",
        detail="killed by signal 11",
    ),
    Forgery(
        name="is killed by a call that is none",
        source="import ctypes; ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 | 1)); print('ok')",
    ),
    Forgery(
        name="files with results everywhere",
        source="""
import json, os
score = json.dumps({"reward": 1.0, "verdict": "ok", "end": "exit", "code": 0, "tests_passed": 1.0})
for folder in ("/tmp", "/dev/shm", ".", "/", "/sandbox"):
    for name in ("result", "result.json", "output", "verdict", "score.json", "stdout", "3"):
        try:
            open(os.path.join(folder, name), "w").write(score)
        except OSError:
            pass
""",
    ),
    Forgery(
        name="a reply of its own in every descriptor",
        source="""
import json, os, socket
reply = json.dumps({"end": "exit", "code": 0, "cpu_s": 0, "wall_s": 0, "waited_s": 0}).encode()
for descriptor in range(1024):
    try:
        os.write(descriptor, reply)
        socket.socket(fileno=descriptor).send(reply)
    except OSError:
        pass
""",
    ),
    Forgery(name="searches all objects and frames", source=SEARCH + "print(sorted(found)[-1] if found else 'none')"),
    Forgery(name="all it found, one a line", source=SEARCH + "print(*sorted(found), sep='\\n')"),
    Forgery(
        name="searches its memory",
        source="""
import ctypes, re
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
top = libc.sbrk(0)
heap = ctypes.string_at(top - (1 << 17), 1 << 17)
print(*{match.decode() for match in re.findall(rb"[0-9a-f]{32}", heap)} or {"none"})
""",
    ),
    Forgery(
        name="kills the parent",
        source="""
import os, signal
for pid in (os.getppid(), 0, -1, 1):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except OSError:
            pass
""",
    ),
    Forgery(
        name="a child that writes after the end",
        source="""
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        os.write(1, b"ok\\n")
        time.sleep(0.001)
""",
    ),
    Forgery(
        name="a thread that writes after the end",
        source="""
import threading, time
def write():
    while True: print("ok", flush=True)
threading.Thread(target=write, daemon=True).start()
""",
    ),
    Forgery(name="writes at exit", source="import atexit; atexit.register(print, 'ok')"),
    Forgery(name="closes its output", source="import os, sys; sys.stdout.close(); os.close(1)"),
    Forgery(name="has no output", source="import sys; del sys.stdout, sys.stderr; sys.__stdout__ = None"),
    Forgery(
        name="has another output, whose text is everything",
        source="""
import sys
class Everything(str):
    __eq__ = lambda self, other: True
    __hash__ = str.__hash__
class Output:
    write = flush = lambda self, *_: Everything("ok")
    closed = False
sys.stdout = sys.__stdout__ = Output()
print(Everything("x"))
""",
    ),
    Forgery(name="invalid UTF-8", source="import os; os.write(1, bytes(range(128, 256)))"),
    Forgery(name="NUL bytes", source="import os; os.write(1, bytes(1000))"),
    Forgery(name="characters that stand for others", source="print('\\ufffd' * 32, '\\x00*?.%s{}[0-9a-f]+')"),
    Forgery(name="many answers, one a line", source="import itertools; print(*range(100000), sep='\\n')"),
    Forgery(name="many answers on a line", source="print(*(f'{number:032x}' for number in range(100000)))"),
    Forgery(name="no answer", source=""),
    Forgery(name="white space", source="print(' \\n\\t\\r\\v\\f' * 10**6)"),
    Forgery(name="not Python", source="This is how: print the answer.", detail="SyntaxError"),
    Forgery(name="half a character in its source", source="print('\ud800')"),
    Forgery(name="a NUL in its source", source="print('\0')"),
    Forgery(name="brackets without end", source="(" * 10**5, detail="exit code 1"),
    Forgery(name="signs without end", source="-" * 10**6 + "1"),
    Forgery(name="much source", source="x = 0\n" * 10**5),
)

# They would all like to be "invalid", which costs nothing.
OF_PROGRAMS_THAT_END_BADLY = (
    Forgery(name="takes all the time", source="while True: pass", detail="CPU time"),
    Forgery(name="sleeps", source="import time; time.sleep(100)", detail="no end after"),
    Forgery(
        name="has itself starved",
        source="""
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(10):
    try:
        is_child = os.fork() == 0
    except OSError:
        continue  # the others have all the places already
    if is_child:
        while True:
            try:
                if os.fork() == 0:
                    end = time.monotonic() + 0.01
                    while time.monotonic() < end: pass
                    os._exit(0)
            except OSError:
                time.sleep(0.001)
time.sleep(100)
""",
        detail="CPU time",
    ),
    Forgery(name="takes all the memory", source="x = []\nwhile True: x.append(bytearray(1 << 24))"),
    Forgery(
        name="enormous output", source="import sys\nwhile True: sys.stdout.write('x ' * 10**6)", detail="of output"
    ),
    Forgery(
        name="enormous output that looks harmless",
        source="""
import os
try:
    while True: os.write(1, b"\\n" * 10**6)
except OSError:
    os._exit(0)
""",
        detail="of output",
    ),
    Forgery(
        name="as much output as there may be, in the smallest words",
        source="import os; os.write(1, b'a\\n' * ((1 << 23) - 1))",
        detail=": expected ",
    ),
    Forgery(
        name="enormous error output",
        source="import os\ntry:\n    while True: os.write(2, b'\\n' * 10**6)\nexcept OSError: raise SystemExit(3)",
        detail="exit code 3",
    ),
    Forgery(name="fork bomb", source="import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    Forgery(
        name="stops the clock of its death",
        source="""
import signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
""",
        detail="CPU time",
    ),
)
