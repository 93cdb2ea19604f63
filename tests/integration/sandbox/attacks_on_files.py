"""List programs that write without end, to output and files: limits hold, and nothing reaches the machine's disk."""

from tests.integration.sandbox.attack import Attack

_MANY = """
made = 0
try:
    for number in range(10**6):
        {make}
        made += 1
except OSError as error:
    print("held" if made < 1000 else made)
"""


def _many(make: str) -> str:
    return "import os\n" + _MANY.format(make=make)


ATTACKS = (
    Attack(name="endless output", source="while True: print('x' * 10**6)", prints=None, ends=("exit 1",)),
    Attack(
        name="endless error output",
        source="import sys\nwhile True: sys.stderr.write('x' * 10**6)",
        prints="",
        ends=("exit 1", "exit 120"),
    ),
    Attack(
        name="endless output and error output, whatever they say",
        source="""
import os
while True:
    for descriptor in (1, 2, 3):
        try:
            os.write(descriptor, b"x" * 10**6)
        except OSError:
            pass
""",
        prints=None,
        ends=("cpu",),
    ),
    Attack(
        name="endless output of children",
        source="import os\nfor _ in range(3): os.system('yes')",
        prints=None,
        ends=("exit 0",),
    ),
    Attack(
        name="output of a terabyte of nothing",
        source="""
import os
for descriptor in (0, 1, 2, 3):
    for change in (lambda: os.ftruncate(descriptor, 1 << 40), lambda: os.posix_fallocate(descriptor, 0, 1 << 30)):
        try:
            change()
            print("grown")
        except OSError:
            pass
print("held")
""",
    ),
    Attack(
        name="disk fill",
        source="""
import os
written = 0
for number in range(100):
    descriptor = os.open(f"/tmp/{number}", os.O_WRONLY | os.O_CREAT)
    os.unlink(f"/tmp/{number}")  # open files take their space without a name
    try:
        while True: written += os.write(descriptor, bytes(1 << 20))
    except OSError:
        if os.fstat(descriptor).st_size == 0: break
print("held" if written <= 64 << 20 else written)
""",
    ),
    Attack(
        name="file of a terabyte of nothing",
        source="""
import os
with open("/tmp/file", "wb") as file:
    for change in (lambda: file.truncate(1 << 40), lambda: os.posix_fallocate(file.fileno(), 0, 1 << 30)):
        try:
            change()
            print("grown")
        except OSError:
            print("held")
""",
        prints="held\nheld\n",
    ),
    Attack(name="a million files", source=_many('os.close(os.open(f"/tmp/{number}", os.O_CREAT))')),
    Attack(name="a million folders", source=_many('os.mkdir(f"/tmp/{number}")')),
    Attack(name="a million folders in each other", source=_many('os.mkdir("x"); os.chdir("x")')),
    Attack(name="a million symbolic links", source=_many('os.symlink("x" * 4000, f"/tmp/{number}")')),
    Attack(
        name="a million hard links",
        source="open('/tmp/x', 'w').close()\n" + _many('os.link("/tmp/x", f"/tmp/{number}")'),
    ),
    Attack(name="a million pipes with names", source=_many('os.mkfifo(f"/dev/shm/{number}")')),
    Attack(name="a million sockets with names", source=_many('os.mknod(f"/dev/shm/{number}", 0o140666)')),
    Attack(
        name="all descriptors",
        source="""
import os
kept = []
try:
    while True: kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    print("held" if len(kept) <= 60 else len(kept))
""",
    ),
    Attack(
        name="input that grows",
        source="""
import os
try:
    while True: os.write(0, bytes(1 << 20))
except OSError:
    print("held" if os.fstat(0).st_size <= 16 << 20 else os.fstat(0).st_size)
""",
    ),
)
