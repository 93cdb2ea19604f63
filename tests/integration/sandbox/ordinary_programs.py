"""List programs and functions in the style of usual solutions, with their inputs and expected outputs."""

# name: (program, input, output)
PROGRAMS = {
    "input and output": ("print(int(input()) + int(input()))", "1\n2\n", "3\n"),
    "all of the input at once": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n3", "6\n"),
    "the input's lines": ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "ab\ncd\n", "ba\ndc\n"),
    "the input by readline": ("import sys\ninput = sys.stdin.readline\nprint(int(input()) * 2)", "21\n", "42\n"),
    "the input's bytes": ("import sys\nprint(sys.stdin.buffer.read().split())", "a b", "[b'a', b'b']\n"),
    "the input by its descriptor": ("import os\nprint(os.read(0, os.fstat(0).st_size))", "ab", "b'ab'\n"),
    "the input as file 0": ("print(open(0).read().split())", "a b", "['a', 'b']\n"),
    "the input as /dev/stdin": ("print(open('/dev/stdin').read().split())", "a b", "['a', 'b']\n"),
    "the end of the input": ("try: input()\nexcept EOFError: print('end')", "", "end\n"),
    "UTF-8": ("s = input()\nprint(s[::-1], len(s))", "añ漢🙂\n", "🙂漢ña 4\n"),
    "output in bytes": ("import sys\nsys.stdout.buffer.write(b'x\\n')", "", "x\n"),
    "output without a line's end": ("print('x', end='')", "", "x"),
    "output as /dev/stdout": ("with open('/dev/stdout', 'w') as out: print('x', file=out)", "", "x\n"),
    "a file of output that is left open": ("out = open(1, 'w')\nout.write('x')", "", "x"),
    "output replaced": ("import sys\nprint('a')\nsys.stdout = open(1, 'w')\nprint('b')", "", "b\na\n"),
    "output wrapped": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'utf-8')\nprint('é')",
        "",
        "é\n",
    ),
    "exit()": ("print('x')\nexit()\nprint('y')", "", "x\n"),
    "quit()": ("print('x')\nquit()\nprint('y')", "", "x\n"),
    "sys.exit()": ("import sys\nprint('x')\nsys.exit()", "", "x\n"),
    "the main guard": ("def main(): print('x')\nif __name__ == '__main__': main()", "", "x\n"),
    "arguments": ("import sys\nprint(len(sys.argv))", "", "1\n"),
    "threads are waited for": (
        "import threading, time\ndef f():\n    time.sleep(0.1)\n    print('x')\nthreading.Thread(target=f).start()",
        "",
        "x\n",
    ),
    "exit handlers": ("import atexit\natexit.register(print, 'b')\nprint('a')", "", "a\nb\n"),
    "finalizers": ("class C:\n    def __del__(self): print('b')\nc = C()\nprint('a')", "", "a\nb\n"),
    "a deep recursion": (
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(10**5))",
        "",
        "100000\n",
    ),
    "a deep recursion with a cache": (
        "import sys\nfrom functools import cache\nsys.setrecursionlimit(10**6)\n"
        "@cache\ndef f(n): return n and 1 + f(n - 1)\nprint(f(10**5))",
        "",
        "100000\n",
    ),
    "a stack as large as it can be": (
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY,) * 2)\nprint('x')",
        "",
        "x\n",
    ),
    "a thread with a large stack": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(64 << 20)\n"
        "def f(n): return n and 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(10**5)))\nt.start()\nt.join()",
        "",
        "100000\n",
    ),
    "a process pool": (
        "from multiprocessing import Pool\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with Pool(2) as pool: print(pool.map(f, range(4)))",
        "",
        "[0, 1, 4, 9]\n",
    ),
    "pools of the usual size": (
        "from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor\nfrom multiprocessing import Pool\n"
        "for kind in (ProcessPoolExecutor, ThreadPoolExecutor):\n"
        "    with kind() as pool: print(sum(pool.map(abs, range(100))))\n"
        "with Pool() as pool: print(sum(pool.map(abs, range(100))))",
        "",
        "4950\n4950\n4950\n",
    ),
    "shared memory of processes": (
        "from multiprocessing import Array, Lock, Process, Value\n"
        "def f(a, v, lock):\n    with lock:\n        a[0] = 7\n        v.value = 8\n"
        "a, v = Array('i', 3), Value('i')\np = Process(target=f, args=(a, v, Lock()))\np.start()\np.join()\n"
        "print(a[:], v.value)",
        "",
        "[7, 0, 0] 8\n",
    ),
    "another program": (
        "import subprocess\nprint(subprocess.run(['sort'], input='b\\na\\n', capture_output=True, text=True).stdout)",
        "",
        "a\nb\n\n",
    ),
    "a shell": ("import os\nprint(os.system('exit 3') >> 8, flush=True)\nos.system('echo x')", "", "3\nx\n"),
    "asyncio": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 'x'\nprint(asyncio.run(f()))",
        "",
        "x\n",
    ),
    "files of its own": (
        "import os, shutil, tempfile\nfolder = tempfile.mkdtemp()\nopen(f'{folder}/a', 'w').write('x')\n"
        "shutil.copy2(f'{folder}/a', 'b')\nprint(open('b').read(), os.getcwd())",
        "",
        "x /tmp\n",
    ),
    "a database": (
        "import sqlite3\nc = sqlite3.connect('x.db')\nc.execute('create table t (a)')\n"
        "c.execute('insert into t values (5)')\nc.commit()\nprint(c.execute('select a from t').fetchall())",
        "",
        "[(5,)]\n",
    ),
    "an alarm": (
        "import signal, time\ndef ring(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, ring)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\ntry:\n    time.sleep(5)\nexcept TimeoutError: print('x')",
        "",
        "x\n",
    ),
    "numpy": ("import numpy as np\nprint((np.ones((500, 500)) @ np.ones((500, 500))).sum())", "", "125000000.0\n"),
    "pickling its own classes": (
        "import pickle\nclass C: pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C)",
        "",
        "True\n",
    ),
    "a data class": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1))",
        "",
        "P(x=1)\n",
    ),
}

# name: (program, function, arguments, value)
FUNCTIONS = {
    "a plain function": ("def add(a, b): return a + b", "add", "[1, 2]", b"3"),
    "a method of Solution": ("class Solution:\n    def add(self, a, b): return a + b", "add", "[1, 2]", b"3"),
    "names of typing": (
        "class Solution:\n    def f(self, x: List[int]) -> Optional[Dict[int, int]]: return {1: x[0]}",
        "f",
        "[[5]]",
        b'{"1": 5}',
    ),
    "names of the libraries": (
        "def f(x): return [heappop(x), Counter('aab')['a'], gcd(4, 6), bisect_left([1, 2], 2), inf > 1, max(x)]",
        "f",
        "[[1, 3, 2]]",
        b"[1, 2, 2, 1, true, 3]",
    ),
    "a tuple": ("def f(): return (1, (2, 3))", "f", "[]", b"[1, [2, 3]]"),
    "a set": ("def f(): return {3, 1, 2}", "f", "[]", b"[1, 2, 3]"),
    "an iterator": ("def f(): return map(str, range(2))", "f", "[]", b'["0", "1"]'),
    "a deque": ("def f(): return deque([1, 2])", "f", "[]", b"[1, 2]"),
    "numbers of numpy": (
        "import numpy as np\ndef f(): return [np.int64(1), np.float64(0.5), np.arange(2), np.bool_(True)]",
        "f",
        "[]",
        b"[1, 0.5, [0, 1], true]",
    ),
    "nothing": ("def f(): pass", "f", "[]", b"null"),
    "text": ("def f(s): return s[::-1]", "f", '["a\\u00e9"]', b'"\\u00e9a"'),
    "what it prints is not what it returns": ("def f():\n    print('x')\n    return 1", "f", "[]", b"1"),
    "its main guard is not run": ("def f(): return 1\nif __name__ == '__main__': print(f(input()))", "f", "[]", b"1"),
}
